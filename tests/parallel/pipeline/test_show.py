"""What is printed and drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from raybench.errors import RequestError
from raybench.parallel.pipeline.actions import Action, Kind
from raybench.parallel.pipeline.check import find_faults
from raybench.parallel.pipeline.draw import cell_colour, draw, grid, listing, save_png
from raybench.parallel.pipeline.schedules import build
from raybench.parallel.pipeline.show import as_text, describe, parse_times, picture
from raybench.parallel.pipeline.simulate import Event, Timeline, Times, simulate

TWENTY = (20.0, 20.0, 20.0, 0.0)
MILLISECOND = Times(forward=0.001, input_gradient=0.001, weight_gradient=0.001)
KEYS = ["name", "stages", "micro_batches", "chunks", "step_time_s", "bubble", "theory_bubble", "actions", "grid"]


def test_the_grid_is_to_scale():
    timeline = simulate(build("one-f-one-b", stages=2, micro_batches=2), MILLISECOND)
    assert grid(timeline).splitlines() == [
        "        0 ms",
        "rank 0 |F0 F1 ..... B0--- .. B1---",
        "rank 1 |.. F0 B0--- F1 B1--- .....",
    ]


def test_the_grid_of_a_measured_step_begins_where_the_step_does():
    events = (Event(Action.parse("0F0"), 5.0, 6.0), Event(Action.parse("0B0"), 7.0, 9.0))
    assert grid(Timeline("measured", (events,))).splitlines() == ["        5000 ms", "rank 0 |F0 .. B0---"]


def test_a_grid_with_chunks_names_the_stage():
    rows = grid(simulate(build("zero-bubble-v", stages=1, micro_batches=1))).splitlines()
    assert rows == ["        0 ms", "rank 0 |0F0 1F0 1I0 1W0 0I0 0W0"]


def test_a_long_grid_breaks_into_blocks_that_join_up():
    timeline = simulate(build("gpipe", stages=3, micro_batches=9))
    whole, broken = grid(timeline, width=10_000).splitlines(), grid(timeline, width=60).splitlines()
    assert max(map(len, broken)) <= 60
    blocks = [broken[i : i + 4] for i in range(0, len(broken), 5)]
    assert len(blocks) > 1
    for row in range(1, 4):
        joined = "".join(block[row][8:].ljust(51) for block in blocks).rstrip()
        assert joined == whole[row][8:]
    assert blocks[1][0].strip() == "17000 ms"  # 51 columns of 3 a second


def test_times_far_apart_do_not_make_an_endless_grid():
    times = Times(forward=1.0, input_gradient=1.0, weight_gradient=1e-6)
    assert max(map(len, grid(simulate(build("zero-bubble", stages=2, micro_batches=2), times)).splitlines())) <= 120
    times = Times(forward=1.0, input_gradient=1.0, weight_gradient=0.0)
    assert "W0" not in grid(simulate(build("zero-bubble", stages=2, micro_batches=2), times))


def test_the_listing_marks_the_place_of_a_fault():
    schedule = build("gpipe", stages=2, micro_batches=1)
    assert listing(schedule) == ("rank 0  0RECV_B0 0F0      0SEND_F0 0B0\nrank 1  1RECV_F0 1F0      1B0      1SEND_B0")
    broken = replace(schedule, actions=(schedule.actions[0], schedule.actions[1][1:]))
    assert listing(broken, find_faults(broken)) == (
        "rank 0  0RECV_B0 0F0      0SEND_F0 0B0\n"
        "rank 1  >1F0<    1B0      1SEND_B0\n"
        "rank 1: 1F0 has no 1RECV_F0 to take its input from"
    )


def test_the_description_is_json_with_the_promised_keys():
    body = json.loads(json.dumps(describe("one-f-one-b", 4, 8, None, TWENTY)))
    assert set(KEYS) <= body.keys()
    assert (body["name"], body["stages"], body["micro_batches"], body["chunks"]) == ("one-f-one-b", 4, 8, 1)
    assert body["step_time_s"] == pytest.approx(0.660)
    assert body["bubble"] == pytest.approx(3 / 11)
    assert body["theory_bubble"] == pytest.approx(3 / 11)
    assert body["peak_activations"] == [4, 3, 2, 1]
    assert [str(Action.parse(text)) for text in body["actions"][3]] == body["actions"][3]
    assert body["grid"].count("rank 3 |") == 1


@pytest.mark.parametrize(("name", "step_time_s"), [("interleaved", 0.570), ("zero-bubble-v", 0.510)])
def test_chunks_share_the_time_of_their_stage(name, step_time_s):
    assert describe(name, 4, 8, None, TWENTY)["step_time_s"] == pytest.approx(step_time_s)
    assert describe(name, 4, 8, 2, (20, 20, 20, 1))["step_time_s"] > step_time_s + 0.005


def test_without_times_every_part_takes_a_millisecond():
    assert describe("gpipe", 2, 2)["step_time_s"] == pytest.approx(0.009)


def test_the_text_says_what_the_description_says():
    text = as_text(describe("zero-bubble", 4, 8, None, TWENTY))
    assert text.startswith("zero-bubble: 4 ranks, 8 micro-batches\n")
    assert "step              540 ms\n" in text
    assert "bubble            11.1% (theory 11.1%)\n" in text
    assert text.endswith("peak activations  4 4 4 4 by rank")
    assert as_text(describe("zero-bubble-v", 2, 3)).endswith("by rank (of 1/2 of a rank's layers)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20,20,20", "times: 3 values, not 4; give F,B,W,C in ms: forward, input gradient, weight gradient, transfer"),
        ("20,x,20,0", "times: '20,x,20,0' is not numbers"),
        ("", "times: '' is not numbers"),
        ("0,20,20,0", "times: forward 0 is not a time; it must be more than 0 ms"),
        ("20,-1,20,0", "times: input gradient -1 is not a time; it must be 0 or more ms"),
        ("20,20,nan,0", "times: weight gradient nan is not a time"),
        ("20,20,20,inf", "times: transfer inf is not a time"),
    ],
)
def test_wrong_times_are_refused_by_name(text, message):
    with pytest.raises(RequestError) as refusal:
        parse_times(text)
    assert str(refusal.value).startswith(message)


def test_times_are_parsed():
    assert parse_times("20, 20.5,1e1,0.7") == (20.0, 20.5, 10.0, 0.7)


def test_the_drawing_has_a_cell_for_every_action():
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    timeline = simulate(build("interleaved", stages=2, micro_batches=2), MILLISECOND)
    ax = Figure(figsize=(12, 3)).add_subplot()
    draw(timeline, ax)
    cells = [len(collection.get_paths()) for collection in ax.collections]
    assert cells == [1, 8, 1, 8]  # of each rank: its ground, and four forwards and four backwards
    assert [text.get_text() for text in ax.texts[:8]] == ["0", "1", "0", "1", "0", "1", "0", "1"]
    colours = {to_rgb(colour) for colour in ax.collections[1].get_facecolors()[:, :3]}
    wanted = {cell_colour(kind, chunk, 2) for kind in (Kind.FORWARD, Kind.BACKWARD) for chunk in (0, 1)}
    assert {tuple(round(part, 6) for part in colour) for colour in colours} == {
        tuple(round(part, 6) for part in colour) for colour in wanted
    }
    assert ax.get_title(loc="left") == "interleaved: 2 ranks × 2 chunks, 2 micro-batches · step 0.015 s · bubble 20.0%"


def test_pictures_are_png_files_and_grow_with_what_they_show(tmp_path):
    from matplotlib.image import imread

    timeline = simulate(build("one-f-one-b", stages=2, micro_batches=2))
    save_png(timeline, tmp_path / "one.png")
    save_png([timeline, timeline], tmp_path / "two.png", titles=["simulated", "measured"])
    picture(tmp_path / "long.png", "zero-bubble", 2, 32, None, TWENTY)
    one, two, long = (imread(tmp_path / f"{name}.png") for name in ("one", "two", "long"))
    assert two.shape[0] > 1.5 * one.shape[0]
    assert two.shape[1] == one.shape[1]
    assert long.shape[1] > one.shape[1]
    backward = [int(part * 255 + 0.5) for part in cell_colour(Kind.BACKWARD, 0, 1)]
    pixels = (one[:, :, :3] * 255 + 0.5).astype(int)
    assert (pixels == backward).all(axis=2).mean() > 0.1


def test_a_picture_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"png: .*missing/plan.png cannot be written \(No such file or directory\)"):
        picture(tmp_path / "missing" / "plan.png", "gpipe", 2, 2)


def test_neither_torch_nor_matplotlib_is_needed_to_describe():
    code = (
        "import sys; from raybench.parallel.pipeline import show;"
        "show.describe('zero-bubble-v', 4, 8);"
        "print(sorted({'torch', 'ray', 'matplotlib', 'numpy', 'pandas'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
