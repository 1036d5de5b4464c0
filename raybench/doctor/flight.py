"""Flight-recorder dumps as JSON: what one rank had under way when it was dumped."""

from __future__ import annotations

import json
import re
from typing import Any

from raybench.doctor.findings import Finding, Result, finding

_OPEN = ("scheduled", "started")


def is_flight_dump(text: str) -> bool:
    """A JSON object with the recorder's entries; pickled dumps are not read (unpickling runs code)."""
    return text.lstrip()[:1] == "{" and '"entries"' in text and _parsed(text) is not None


def flight_findings(text: str) -> Result:
    """`pending`: collectives not completed, the oldest first; and what that means."""
    dump = _parsed(text) or {}
    pending = [_entry(entry) for entry in dump["entries"] if isinstance(entry, dict) and entry.get("state") in _OPEN]
    found: list[Finding] = []
    if pending:
        first = pending[0]
        found.append(
            finding(
                "collective-timeout",
                f"When this was recorded, {first['op']} #{first['seq']} of group {first['group']} was still "
                f"{first['state']}, with {len(pending)} in all.",
                json.dumps(first),
                [
                    "Compare `pending` of all ranks' dumps: `torchfrtrace DIR` does, and names the rank that did not "
                    "join."
                ],
            )
        )
    found += _idle(dump.get("pg_status"), {str(entry["group"]) for entry in pending})
    return {"pending": pending, "findings": found}


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        dump = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return dump if isinstance(dump, dict) and isinstance(dump.get("entries"), list) else None


def _entry(entry: dict[str, Any]) -> Result:
    group = entry.get("process_group")
    name = str(entry.get("profiling_name", "?"))
    return {
        "group": str(group[0]) if isinstance(group, list) and group else str(entry.get("pg_id", "?")),
        "seq": entry.get("collective_seq_id", entry.get("seq_id")),
        "op": re.sub(r"^\w+:", "", name),
        "state": str(entry.get("state")),
        "input_sizes": entry.get("input_sizes"),
    }


def _idle(statuses: Any, busy: set[str]) -> list[Finding]:
    if not isinstance(statuses, dict):
        return []
    idle = [
        str(group)
        for group, status in statuses.items()
        if isinstance(status, dict)
        and status.get("last_enqueued_collective") is not None
        and status.get("last_enqueued_collective") == status.get("last_completed_collective")
        and str(group) not in busy
    ]
    if not idle or not busy:
        return []
    return [
        finding(
            "other-group-stuck",
            f"Group {', '.join(idle)} had nothing under way; the hang is in group {', '.join(sorted(busy))}.",
            None,
            [],
        )
    ]
