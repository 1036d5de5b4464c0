"""What an error looks like in NCCL's log: a table of message patterns, and which of two errnos in a line counts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from raybench.doctor.nccl_lines import Record

_IGNORE = re.IGNORECASE


@dataclass(frozen=True)
class _Pattern:
    """A message: a word that it cannot do without (lower case, cheap to look for), and the whole of it."""

    code: str
    needle: str
    regex: re.Pattern[str]


def _patterns(*rows: tuple[str, str, str]) -> tuple[_Pattern, ...]:
    return tuple(_Pattern(code, needle, re.compile(regex, _IGNORE)) for code, needle, regex in rows)


_STATUS = r"(?:error|status)\s*=?\s*(?:\w+\()?"

# Words that belong to NCCL alone: these count wherever they stand, even in an exception's text.
_ANYWHERE: Final = _patterns(
    ("ib-retry-exceeded", "completion", rf"Got completion.*?{_STATUS}12\b"),
    ("ib-local-protection", "completion", rf"Got completion.*?{_STATUS}4\b"),
    ("ib-retry-exceeded", "completion", rf"Got completion(?!.*{_STATUS}\d).*vendor.err\s*=?\s*129\b"),
    ("ib-local-protection", "completion", rf"Got completion(?!.*{_STATUS}\d).*vendor.err\s*=?\s*81\b"),
    ("ib-retry-exceeded", "retry count exceeded", r"Transport retry count exceeded"),
    ("roce-gid-or-route", "ibv_modify_qp", r"ibv_modify_qp\S* failed"),
    (
        "memlock-too-low",
        "cannot allocate memory",
        r"ibv_(?:\w+_)?(?:reg_\w*mr|create_cq|create_qp)\w* failed.*Cannot alloc",
    ),
    ("duplicate-gpu", "duplicate gpu", r"Duplicate GPU detected"),
    ("peer-access-unsupported", "ipc handle", r"failed to open CUDA IPC handle"),
    ("peer-access-unsupported", "peer access", r"peer access is not supported"),
    ("p2p-disabled", "p2p is disabled", r"P2P is disabled between connected GPUs"),
    ("size-mismatch", "truncated", r"message truncated ?: rece|peer \S+ message truncated"),
    ("size-mismatch", "mismatch error", r"collective mismatch error"),
    ("mixed-versions", "mismatched", r"Mismatched [NR]CCL version"),
    ("net-plugin-failed", "fi_getinfo", r"fi_getinfo\(\) call failed"),
    ("net-plugin-failed", "net plugin", r"Failed to initialize any NET plugin"),
    ("net-plugin-failed", "aws-ofi", r"aws-ofi-\wccl initialization failed"),
    ("net-plugin-failed", "not found", r"Error: network .{1,60}? not found"),
    ("nvls-fabric-manager", "cuda failure", r"(?:nvls|multicast|mc_arena)\.cc\S*.*Cuda failure|Cuda failure 802\b"),
    ("nvls-fabric-manager", "nvlink sharp", r"bind NVLink SHARP \(NVLS\)"),
    ("shm-too-small", "shared memory segment", r"creating shared memory segment.*nccl"),
    (
        "shm-too-small",
        "no space left",
        r"(?:/dev/shm/nccl-|shared memory object|</?torch_\d+).*No space left on device",
    ),
    ("interface-not-found", "no socket interface", r"no socket interface found"),
    ("interface-not-found", "is neither af_inet", r"family \d+ is neither AF_INET"),
)
# Words of the operating system: these count in NCCL's own records only.
_IN_RECORDS: Final = _patterns(
    ("shm-too-small", "shared memory segment", r"creating shared memory segment"),
    ("shm-too-small", "no space left", r"(?:shm|posix_fallocate|ftruncate|shared mem).*No space left on device"),
    ("interface-not-found", "interface found", r"no (?:ip )?interface found"),
    ("interface-not-found", "address family", r"Address family not supported by protocol"),
    ("size-mismatch", "truncated", r"message truncated"),
    ("peer-closed", "closed by remote", r"Connection closed by remote peer"),
    ("peer-closed", "connection reset", r"Connection reset by peer"),
    ("peer-closed", "broken pipe", r"Broken pipe"),
    ("iommu-not-passthrough", "missing", r'Missing "(?:iommu=pt|amd_iommu=on)"'),
    ("wrong-interface", "fe80:", r"\bfe80:[0-9a-f:]+(?:%\w+)?<\d+>"),
)
_ERRNO: Final = {
    "connection refused": "connection-refused",
    "connection timed out": "connection-timeout",
    "no route to host": "peer-unreachable",
    "software caused connection abort": "peer-unreachable",
    "network is unreachable": "peer-unreachable",
    "exceeded retries": "connection-refused",
    "exceeded timeouts": "connection-timeout",
    "111": "connection-refused",
    "110": "connection-timeout",
    "113": "peer-unreachable",
    "103": "peer-unreachable",
    "101": "peer-unreachable",
}
_ERRNO_TEXT = re.compile(
    r"(?:returned|errno|error) (\d+)\b|(connection refused|connection timed out|no route to host"
    r"|software caused connection abort|network is unreachable|exceeded retries|exceeded timeouts)",
    _IGNORE,
)
_ERRNO_NEEDLES: Final = ("returned", "errno", "refused", "timed out", "route", "abort", "unreachable", "exceeded")
# What a line that is no warning has to contain for one of the patterns to fit: looked for first.
_TROUBLE: Final = (
    *("ail", "eturn", "rror", "isabled", "completion", "exceeded", "uplicate", "upport", "runcat", "ismatch"),
    *("hared mem", "No space", "nterface found", "neither", "fe80", "losed by"),
)
_MAX_JOINED = 2000
_NO_MESSAGE = re.compile(r"WARN\s*$")
_NET_CONTEXT = re.compile(r"socket|connect|\bnet|bootstrap|proxy|\bos/|\brecv|\bsend|peer|Call to", _IGNORE)
_SHM_CONTEXT = re.compile(r"shm|shared|fallocate|truncate|Error|Call to", _IGNORE)
_UNFINISHED = re.compile(r"(?:[:,(]|failed|error|returned|with|to|by|from|is|no|not|call|errno|on)\s*$", _IGNORE)


@dataclass
class Sign:
    """All lines of one code: the first as evidence, how many there are, and whether retrying may have cured it."""

    code: str
    number: int
    evidence: str
    count: int = 1
    only_retries: bool = False
    last: int = 0


@dataclass
class Signs:
    """What was found so far, by code."""

    found: dict[str, Sign] = field(default_factory=dict)
    num_joined: int = 0

    def read(self, record: Record) -> None:
        """Look for errors in one record, in its wrapped rest where it alone shows none."""
        own = bool(record.level)
        if record.level != "WARN" and not record.tail and not _suspicious(record.text):
            return
        codes = list(_codes_cached(_message(record.text), own))
        evidence = record.text
        unfinished = _UNFINISHED.search(record.text) is not None if record.tail and not codes else False
        if record.tail and not codes and (record.level == "WARN" or unfinished) and self.num_joined < _MAX_JOINED:
            self.num_joined += 1
            starts_by = len(record.text) + unfinished
            for reading in record.readings()[1:]:
                codes = codes_of(reading, own=own, starts_by=None if _NO_MESSAGE.search(record.text) else starts_by)
                if codes:
                    evidence = reading
                    break
        retrying = record.level == "INFO" and "retrying" in record.text
        for code in codes:
            self.add(code, record.number, evidence, retrying=retrying)

    def add(self, code: str, number: int, evidence: str, *, retrying: bool = False) -> None:
        """Note one line of a code."""
        sign = self.found.get(code)
        if sign is None:
            self.found[code] = Sign(code, number, evidence.strip(), only_retries=retrying, last=number)
            return
        sign.count += 1
        sign.last = number
        if sign.only_retries and not retrying:  # the warning says more than the attempts before it
            sign.number, sign.evidence, sign.only_retries = number, evidence.strip(), False

    def forget_cured(self, connected_at: int) -> None:
        """Attempts that were retried, and after which all connections came up, are no error."""
        cured = [code for code, sign in self.found.items() if sign.only_retries and sign.last < connected_at]
        for code in cured:
            del self.found[code]


def _suspicious(text: str) -> bool:
    for word in _TROUBLE:  # noqa: SIM110 (a loop is twice as quick as any() over a generator)
        if word in text:
            return True
    return False


def _message(text: str) -> str:
    """From the source file's name on, without host and process: repeated messages are then the same."""
    mark = text.find("NCCL ")
    return text[text.rfind(" ", 0, mark - 1) + 1 :] if mark > 0 else text


@lru_cache(maxsize=2048)
def _codes_cached(message: str, own: bool) -> tuple[str, ...]:
    return tuple(codes_of(message, own=own))


def codes_of(text: str, *, own: bool, starts_by: int | None = None) -> list[str]:
    """Codes of one message; `own`: it is NCCL's record; `starts_by`: where a match has to begin at the latest."""
    codes: list[str] = []
    lower = text.lower()
    for pattern in _ANYWHERE + _IN_RECORDS if own else _ANYWHERE:
        if pattern.needle in lower and pattern.code not in codes:
            match = pattern.regex.search(text)
            if match and (pattern in _ANYWHERE or _begins_in(text, match.start(), starts_by, pattern.code)):
                codes.append(pattern.code)
    if own and any(needle in lower for needle in _ERRNO_NEEDLES):
        code = _socket_code(text, starts_by)
        if code:
            codes.append(code)
    return codes


def _socket_code(text: str, starts_by: int | None) -> str | None:
    """The first errno of a line says what happened; those after it are left over from earlier calls."""
    if "ibv_" in text or "completion" in text:
        return None
    for match in _ERRNO_TEXT.finditer(text):
        code = _ERRNO.get((match.group(1) or match.group(2)).lower())
        if code and _begins_in(text, match.start(), starts_by, code):
            return code
    return None


def _begins_in(text: str, start: int, starts_by: int | None, code: str) -> bool:
    """In a joined text: the match begins in the record itself, or the record speaks of what its rest then tells."""
    if starts_by is None or start <= starts_by:
        return True
    context = _SHM_CONTEXT if code == "shm-too-small" else _NET_CONTEXT
    return context.search(text, 0, starts_by) is not None
