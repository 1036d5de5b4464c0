"""Reads `nvidia-smi topo -m` (every layout of it) and `topo -p2p`: which devices there are and what joins them.

The format is a table for eyes, not for programs: columns are found by what stands in them, never by their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import combinations

from raybench.doctor.findings import Result, by_severity
from raybench.doctor.text import split_lines
from raybench.doctor.topo_findings import judge, not_recognised, truncated
from raybench.doctor.topo_table import (
    HOPS,
    Table,
    header_of,
    is_link_legend,
    legend_entries,
    prefixed,
    read_row,
    row_name,
    table_without_header,
    without_line_numbers,
)
from raybench.doctor.topo_wrapped import unwrapped

_KEEP_WHOLE = 4_000_000
_LONGEST_ROW = 4000
_ROW_WORDS = re.compile(r"GPU\d|NIC\d|\s(?:PIX|PXB|PHB|NODE|SYS|SOC|NV\d+)\s")


def read_topo(text: str) -> Result:
    """Facts and findings of one pasted topology; a file of two hosts gives `hosts`, one entry each."""
    tables, legend_seen = _tables(text)
    matrices = [table for table in tables if table.is_topology]
    peers = [table for table in tables if not table.is_topology]
    if len(matrices) > 1:
        own = {
            id(matrix): [peer for peer in peers if peer.host == position] for position, matrix in enumerate(matrices)
        }
        return {"kind": "topo", "hosts": [_answer(matrix, own[id(matrix)]) for matrix in matrices]}
    if matrices:
        return {"kind": "topo", **_answer(matrices[0], peers)}
    peer = next((table for table in peers if table.devices), None)
    if peer is not None:
        return {"kind": "topo", **_answer(peer, peers)}
    loose = peers[0] if peers else Table()
    answer = _facts(loose)
    answer["complete"] = False
    known = bool(loose.legend) or legend_seen
    answer["findings"] = [truncated("only the legend of the matrix is here") if known else not_recognised(text)]
    return {"kind": "topo", **answer}


def relevant_text(lines: Iterable[str]) -> str:
    """All of a small file; of a large one the lines that could belong to a matrix."""
    kept: list[str] = []
    size = 0
    for line in lines:
        size += len(line)
        if size < _KEEP_WHOLE or (len(line) < _LONGEST_ROW and _ROW_WORDS.search(line)):
            kept.append(line)
    return "".join(kept)


def _tables(text: str) -> tuple[list[Table], bool]:
    """The matrices of a text in order, each with its own NIC legend; and whether a legend of link types was seen."""
    lines = unwrapped(split_lines(text))
    parts = without_line_numbers([prefixed(line) for line in lines])
    tables: list[Table] = []
    current: dict[str, Table] = {}  # by the prefix that a parallel shell put before every line of a host
    orphans: list[str] = []
    legend_seen = False
    waiting = ""
    for number, (prefix, body) in enumerate(parts):
        table = current.get(prefix)
        devices, titles = header_of(body)
        if devices:
            if table is None or table.rows or not tables or tables[-1] is not table:
                table = Table()
                tables.append(table)
            table.devices, table.titles, table.header = devices, titles, body
            current[prefix] = table
            continue
        name = row_name(body)
        if name is not None:
            if table is not None and table.devices:
                table.add(read_row(body, name, table.devices, table.titles))
                if number == len(lines) - 1:
                    table.cut_last_row(name)
            else:
                orphans.append(body)
            continue
        entries = legend_entries(body)
        if waiting and not entries and len(body.split()) == 1:
            entries = {waiting: body.strip()}  # wrapped after the colon
        waiting = next((entry for entry, value in entries.items() if not value), "")
        if entries:
            if table is None:
                table = current[prefix] = Table()
                tables.append(table)
            table.add_legend(entries)
        legend_seen = legend_seen or is_link_legend(body)
    if orphans and not any(table.devices for table in tables):
        loose = tables[0] if tables else Table()
        rebuilt = table_without_header(orphans)
        rebuilt.legend = loose.legend
        tables = [rebuilt]
    return _with_hosts([table for table in tables if table.rows or table.titles or table.legend]), legend_seen


def _with_hosts(tables: list[Table]) -> list[Table]:
    """Number the hosts: a peer-to-peer matrix belongs to the topology before it, else to the one after."""
    host = -1
    for table in tables:
        host += table.is_topology
        table.host = max(host, 0)
    return tables


def _answer(table: Table, peers: list[Table]) -> Result:
    facts = _facts(table)
    facts["findings"] = by_severity(judge(facts, table, peers))
    return facts


def _facts(table: Table) -> Result:
    gpus = [name for name in table.devices if name.startswith("GPU")]
    nics = [name for name in table.devices if not name.startswith("GPU")] or list(table.legend)
    links: dict[str, str] = {}
    gpu_nic: dict[str, str] = {}
    if table.is_topology:
        for one, other in combinations(sorted(gpus, key=_number), 2):
            link = table.link(one, other)
            if link:
                links[f"{one}-{other}"] = link
        for gpu in gpus:
            for nic in nics:
                link = table.link(gpu, nic)
                if link:
                    gpu_nic[f"{gpu}-{nic}"] = link
    num_pairs = len(gpus) * (len(gpus) - 1) // 2
    return {
        "complete": table.complete,
        "gpus": gpus,
        "nics": [{"name": name, "device": table.device(name)} for name in nics],
        "links": links,
        "gpu_nic_links": gpu_nic,
        "cpu_affinity": table.affinity("cpu"),
        "numa_affinity": table.affinity("numa"),
        "worst_link": max(links.values(), key=slowness, default=None),
        "nvlink_full_mesh": num_pairs > 0 and len(links) == num_pairs and all(map(is_nvlink, links.values())),
    }


def slowness(link: str) -> tuple[int, int]:
    """Sorts links from fast to slow; among NVLinks fewer lanes are slower."""
    if is_nvlink(link):
        return (-1, -int(link[2:]))
    return (HOPS.index(link), 0)


def is_nvlink(link: str) -> bool:
    """NV# and nothing else."""
    return link.startswith("NV")


def _number(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    return int(digits) if digits else 0
