"""Kineto's files: every version's shape, and files that are broken."""

import gzip
import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raybench.traces import stream
from raybench.traces.command import read_file
from raybench.traces.events import Kind
from raybench.traces.kineto import read_trace
from raybench.traces.rank import report_rank
from raybench.traces.stream import UnreadableTraceError
from tests.traces import made

EVENTS = [
    made.annotation("ProfilerStep#3", 0, 100),
    made.kernel("gemm", 10.5, 20.25, correlation=4),
    made.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 20, 30, stream=9, correlation=5),
    made.launch(5, 4),
    made.event("python_function", 'text with }, {"ph": and \\"', 0, 1),
    {"ph": "s", "id": 4, "pid": 1, "tid": 1, "ts": 5, "cat": "ac2g", "name": "ac2g"},
    {
        "name": "process_name",
        "ph": "M",
        "ts": 0,
        "pid": 1,
        "tid": 0,
        "args": {"name": "python", "list": [{}, {"a": 1}]},
    },
]


def rows(trace):
    e = trace.events
    return [
        (Kind(kind).name, e.names[name], e.lanes[lane], begin, end, correlation)
        for kind, name, lane, begin, end, correlation in zip(
            e.kind.tolist(), e.name.tolist(), e.lane.tolist(), e.begin.tolist(), e.end.tolist(), e.correlation.tolist(),
            strict=True,
        )
    ]  # fmt: skip


EXPECTED = [
    ("ANNOTATION", "ProfilerStep#3", (1, 1), made.BASE_NS, made.BASE_NS + 100_000, -1),
    ("KERNEL", "gemm", (0, 7), made.BASE_NS + 10_500, made.BASE_NS + 30_750, 4),
    ("KERNEL", EVENTS[2]["name"], (0, 9), made.BASE_NS + 20_000, made.BASE_NS + 50_000, 5),
    ("LAUNCH", "cudaLaunchKernel", (1, 1), made.BASE_NS + 5_000, made.BASE_NS + 6_000, 4),
]


@pytest.mark.parametrize("block_bytes", [16, 200, 1 << 22])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_pieces_of_any_size(tmp_path, monkeypatch, block_bytes, indent, name):
    monkeypatch.setattr(stream, "BLOCK_BYTES", block_bytes)
    trace = read_trace(made.write(tmp_path / name, made.document(EVENTS, rank=3, world_size=8), indent=indent))
    assert rows(trace) == EXPECTED
    assert (trace.rank, trace.world_size, trace.backend, trace.device) == (3, 8, "nccl", "Made GPU")
    assert trace.problems == []


def test_events_before_what_describes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_BYTES", 64)
    document = made.document(EVENTS, rank=2)
    moved = {"traceEvents": document.pop("traceEvents"), **document}
    trace = read_trace(made.write(tmp_path / "t.json", moved))
    assert (rows(trace), trace.rank, trace.device) == (EXPECTED, 2, "Made GPU")


def test_list_without_a_document(tmp_path):
    trace = read_trace(made.write(tmp_path / "t.json", json.dumps(EVENTS).encode()))
    assert [row[3] + made.BASE_NS for row in rows(trace)] == [row[3] for row in EXPECTED]
    assert (trace.rank, trace.problems) == (None, [])


def test_several_packed_files_in_one(tmp_path):
    data = json.dumps(made.document(EVENTS)).encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(data[:100]) + gzip.compress(data[100:]))
    assert rows(read_trace(path)) == EXPECTED


@pytest.mark.parametrize("kernel", ["kernel", "Kernel"])
def test_whole_microseconds_since_1970(tmp_path, kernel):
    """To 2024: exact, although such a time in nanoseconds does not fit a float."""
    events = [made.kernel("gemm", 1_694_128_201_429_795, 8, cat=kernel)]
    document = made.document(events)
    del document["baseTimeNanoseconds"]
    (row,) = rows(read_trace(made.write(tmp_path / "t.json", document)))
    assert row[3:5] == (1_694_128_201_429_795_000, 1_694_128_201_429_803_000)


def test_numbers_as_text(tmp_path):
    event = {**made.kernel("gemm", "12.5", "3"), "pid": "0", "args": {"stream": "7", "correlation": "11"}}
    (row,) = rows(read_trace(made.write(tmp_path / "t.json", made.document([event]))))
    assert row[3:] == (made.BASE_NS + 12_500, made.BASE_NS + 15_500, 11)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"correlation": null}',
        '{"bandwidth": inf}',
        '{"x": -nan}',
        '["list"]',
        '{"correlation": 1e30}',
        '{"x": "\xff"}',
    ],
)
def test_odd_arguments_lose_no_event(tmp_path, arguments):
    good, odd = (json.dumps(made.kernel(name, 0, 5)) for name in ("good", "odd"))
    odd = odd[: odd.index('"args"')] + f'"args": {arguments}}}'
    data = ('{"traceEvents": [' + ",".join([good, odd, good]) + "]}").encode("latin-1")
    trace = read_trace(made.write(tmp_path / "t.json", data))
    assert [row[1] for row in rows(trace)] == ["good", "odd", "good"]


def test_broken_event_among_good_ones(tmp_path):
    good = json.dumps(made.kernel("good", 0, 5))
    text = '{"traceEvents": [' + ",".join([good, '{"ph": "X" "cat"}', "{}", good]) + "]}"
    trace = read_trace(made.write(tmp_path / "t.json", text.encode()))
    assert [row[1] for row in rows(trace)] == ["good", "good"]
    assert trace.problems == ["1 events that are not JSON"]


def test_impossible_times(tmp_path):
    events = [made.kernel("good", 0, 5), made.kernel("back", 10, -3), made.kernel("far", 1e300, 1)]
    trace = read_trace(made.write(tmp_path / "t.json", made.document(events)))
    assert [(row[1], row[4] - row[3]) for row in rows(trace)] == [("good", 5000), ("back", 0)]
    assert trace.problems == ["1 events without a usable time", "1 negative durations, taken as 0"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (gzip.compress(b'{"traceEvents": []}')[:8], "the packed file ends early"),
        (gzip.compress(b'{"traceEvents": []}')[:12], "the packed file ends early"),
        (b"not json", "not JSON"),
        (b"{}", "no traceEvents"),
        (b'{"traceEvents": []}', "no events"),
        (b'{"schema": "1.1.1", "nodes": [{"id": 2, "name": "x"}]}', "execution trace"),
        (b'{"traceEvents": 3}', "no traceEvents"),
    ],
)
def test_unusable_files_in_one_sentence(tmp_path, content, said):
    path = made.write(tmp_path / "t.json", content)
    with pytest.raises(UnreadableTraceError, match=said):
        read_trace(path)
    assert said in read_file(path)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keep=st.floats(0, 1))
def test_cut_anywhere(tmp_path, name, keep):
    """A file that ends early gives what is there and says so, or one sentence."""
    whole = made.write(tmp_path / name, made.document(EVENTS * 20)).read_bytes()
    path = tmp_path / f"cut-{name}"
    path.write_bytes(whole[: int(keep * len(whole))])
    found = read_file(path)
    if isinstance(found, str):
        return
    (report,) = found
    assert report.on_gpu or report.span_ns == 0
    if b"baseTimeNanoseconds" not in path.read_bytes() and name == "t.json":
        assert report.problems


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
odd_events = st.one_of(
    values,
    st.fixed_dictionaries(
        {},
        optional={
            "ph": st.sampled_from(["X", "i", "M"]) | values,
            "cat": st.sampled_from(["kernel", "cpu_op", "user_annotation", "cuda_runtime"]) | values,
            "name": st.sampled_from(["gemm", "ncclDevKernel_Generic()", "gloo:all_reduce", "[memory]", "PP:0F1"])
            | values,
            "ts": st.integers(0, 10**6) | values,
            "dur": st.integers(-5, 1000) | values,
            "pid": st.integers(0, 2) | values,
            "tid": st.integers(0, 2) | values,
            "args": st.dictionaries(
                st.sampled_from(
                    ["correlation", "Collective name", "Input Dims", "Input type", "Total Allocated", "dtype"]
                ),
                values,
            )
            | values,
        },
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(odd_events, max_size=6), about=st.dictionaries(st.sampled_from(
    ["distributedInfo", "deviceProperties", "baseTimeNanoseconds", "raybench"]), values), around=values)  # fmt: skip
def test_odd_content_never_ends_in_a_traceback(tmp_path, events, about, around):
    document = {**about, "traceEvents": [made.kernel("gemm", 3, 4), *events]}
    path = made.write(tmp_path / "t.json", document)
    found = read_file(path)
    assert isinstance(found, list)
    assert found[0].compute_ns >= 4000
    assert isinstance(read_file(made.write(tmp_path / "u.json", json.dumps(around).encode())), str)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=60), at=st.floats(0, 1))
def test_noise_anywhere(tmp_path, noise, at):
    data = json.dumps(made.document(EVENTS * 3)).encode()
    place = int(at * len(data))
    assert read_file(made.write(tmp_path / "t.json", data[:place] + noise + data[place:]))


FIXED_BYTES = {"t.json": 1 << 14, "t.json.gz": 11 << 12}
"""What any file takes, however small: the report with its timeline, and if it is packed, gzip's window of 32 KiB."""


@pytest.mark.parametrize("name", FIXED_BYTES)
@pytest.mark.parametrize(
    ("number", "text", "times"),
    [
        (1, "", 4),
        (5, "", 4),
        (20, "", 4),
        (50, "", 4),
        (100, "", 4),
        (500, "", 2),
        (5_000, "", 1.5),
        (40_000, "", 1.5),
        (4_000, "x" * 3000, 1.5),
    ],
)
def test_memory_is_bounded_by_the_size_of_the_file(tmp_path, name, number, text, times):
    """Growth over a process that has read a trace before; the larger the file, the less of it."""
    event = made.kernel("gemm", 0, 1, correlation=1, text=text)
    path = made.write(tmp_path / name, made.document([{**event, "ts": i} for i in range(number)]))
    report_rank(path)
    tracemalloc.start()
    try:
        report = report_rank(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.unpacked_bytes > 100 * number
    assert peak < times * report.unpacked_bytes + FIXED_BYTES[name]


@pytest.mark.parametrize(
    "content",
    [
        '{"traceEvents": ["' + "x" * 2_000_000,
        '{"traceEvents": [' + '{"args": [' * 20_000,
        '{"traceEvents": [{"ph": 3, "args": [' + "1," * 1_000_000 + '1]}, {"ph": "X"}]}',
        '{"traceEvents": [' + '"}, {", ' * 80_000 + "0]}",
        '{"x": "' + "y" * 2_000_000 + '"}',
    ],
    ids=["text", "depth", "arguments", "texts", "no events"],
)
def test_memory_is_bounded_for_what_is_no_trace(tmp_path, content):
    path = made.write(tmp_path / "t.json", content.encode())
    tracemalloc.start()
    try:
        assert isinstance(read_file(path), str)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(content)
    finally:
        tracemalloc.stop()
