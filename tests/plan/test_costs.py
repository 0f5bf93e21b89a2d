"""The data files of devices: what they hold, what a plan reads of them, and the command that writes them."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from gossamer.bench.results import read_records
from gossamer.patterns import Pattern
from gossamer.plan.capability import GatherChoice
from gossamer.plan.costs import BITS, COMMAND, FOLDER, HEADS, Cost, DeviceCosts, File, costs_of, files, read
from gossamer.plan.estimate import Sample
from gossamer.plan.plan import plan_of
from gossamer.plan.problem import Problem, Unsupported
from gossamer.plan.table import load
from gossamer.torch.planning import Chip
from tests.support.choices import everywhere

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
PROBLEM = Problem(1, 8, 8, 4096, 4096, 128, 128, "bfloat16", "cuda", sm=90, processors=132)
NAMES = sorted(files())


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source_that_is_there(name: str) -> None:
    """A row is named with its file, a page with its path: `window_4096_causal forward` of `nvidia_h200.jsonl.gz`."""
    for cost in files()[name].costs:
        assert cost.by and (cost.value > 0 or cost.cost == "bits" or (cost.cost, name) == ("views", "cpu")), cost
        for page in re.findall(r"docs/[\w/]+\.md", cost.by):
            assert (ROOT / page).is_file(), cost
        for results, case, direction in re.findall(r"(\w+\.jsonl(?:\.gz)?): (\w+).* (forward|backward)", cost.by):
            rows = read_records(ROOT / "benchmarks" / "results" / results)
            assert any((row["case"], row["direction"]) == (case, direction) for row in rows), cost


@pytest.mark.parametrize("name", NAMES)
def test_a_number_is_there_once(name: str) -> None:
    costs = [(c.of, c.cost, c.bits, c.direction, c.head) for c in files()[name].costs]
    assert len(costs) == len(set(costs))
    assert "seconds" in json.loads((FOLDER / f"{name}.json").read_text())["units"]["value"]
    for bits, scale in files()[name].scale.items():
        scaled = {c.direction for c in files()[name].costs if (c.of, c.cost, c.bits) == (scale, "pair", int(bits))}
        assert scaled == {"forward", "backward"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_whatever_an_implementation_offers_has_its_costs(device: str) -> None:
    sms, seen = (None,) if device == "cpu" else (75, 80, 89, 90, 100), 0
    with everywhere():
        for dtype, sm, backward, size, Q in product(BITS, sms, (False, True), (16, *HEADS, 300), (1, 4096)):
            problem = replace(PROBLEM, device=device, dtype=dtype, sm=sm, backward=backward, D=size, E=size, Q=Q)
            try:
                plan = plan_of(problem, backward=backward)
            except Unsupported:
                continue
            seen += len(plan.options)
            for _, tile in plan.options:
                assert min(tile.pair, tile.row) > 0 <= tile.bits and (device == "cpu" or tile.step > 0)
            for _, gather in plan.gather_options:
                assert min(gather.column, gather.row) > 0 and (device == "cpu" or gather.step > 0)
                assert (gather.pair > 0) == (gather.choice.block_q > 1)
    assert seen


def test_a_device_that_was_not_measured_takes_the_nearest() -> None:
    """Its costs compare as they do there; with fewer processors the whole device is slower, and one of them is not."""
    known, half = costs_of(PROBLEM), costs_of(replace(PROBLEM, sm=80, processors=66))
    assert known.measured and not half.measured and half.file is known.file is files()["h200"]
    tile, same = known.tile("triton", 128, 128), half.tile("triton", 128, 128)
    assert same == tile._replace(pair=2 * tile.pair, bits=2 * tile.bits, row=2 * tile.row)
    assert half.of_device("start") == known.of_device("start")
    assert not any(costs_of(replace(PROBLEM, **other)).measured for other in ({"dtype": "float32"}, {"D": 257}))
    assert costs_of(replace(PROBLEM, device="cpu", sm=None)).file is files()["cpu"]


def test_a_cost_is_scaled_from_where_it_was_measured() -> None:
    """To other directions and head sizes as the pairs of `hopper`, which were timed in all of them."""
    forward, backward = (costs_of(replace(PROBLEM, D=64, E=64, backward=backward)) for backward in (False, True))
    pairs = [costs.tile("hopper", 128, 128).pair for costs in (forward, backward)]
    for name in ("triton", "hopper"):
        tiles = [costs.tile(name, 128, 128) for costs in (forward, backward)]
        assert tiles[1].step / tiles[0].step == pytest.approx(pairs[1] / pairs[0])
    wide = costs_of(replace(PROBLEM, D=512)).tile("triton", 128, 128).pair
    assert wide == pytest.approx(2 * costs_of(replace(PROBLEM, D=256)).tile("triton", 128, 128).pair)


def test_an_implementation_that_nobody_measured() -> None:
    """It is taken to be as fast as the one that was measured most; a gather layout has to be measured."""
    costs = costs_of(PROBLEM)
    assert costs.tile("new", 32, 32).pair == costs.tile("hopper", 128, 128).pair
    with pytest.raises(LookupError, match="no 'pair' of new gather 32 for 16 bits in the file of NVIDIA H200"):
        costs.gather("new", GatherChoice(32, frozenset({"bfloat16"}), max_head_dim=64, min_sm=80))


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import measure_costs

    yield measure_costs
    sys.modules.pop("measure_costs")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_as_the_command_writes_it(command, name: str) -> None:
    text = (FOLDER / f"{name}.json").read_text()
    assert command.text(read(text)) == text


def test_what_a_cpu_takes_is_measured_and_written(command, tmp_path: Path) -> None:
    """On sizes that say little: every number that is not a guess is written anew, and one may be nothing."""
    before = files()["cpu"]
    command.main(["--device", "cpu", "--small", "--write", str(tmp_path)])
    after = read((tmp_path / "cpu.json").read_text())
    assert [c._replace(value=0, by="") for c in after.costs] == [c._replace(value=0, by="") for c in before.costs]
    guesses = [c for c in before.costs if c.by.startswith(command.GUESS)]
    assert [c for c in after.costs if c.by.startswith(command.GUESS)] == guesses != []
    assert all(c.value >= 0 and c.by == COMMAND for c in after.costs if c not in guesses)


def test_every_number_of_a_gpu_is_found_again(command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU that is not there, whose calls take what their counts and the file say."""
    before = files()["h200"]

    def seconds(self, name: str, p: Problem, pattern: Pattern, tile: tuple[int, int] | int) -> float:
        known, sample, q_offset = costs_of(p), Sample(pattern, pattern._sizes(p.Q, p.K)), p.K - p.Q
        start, combine = (known.of_device(cost) for cost in ("start", "combine"))
        if isinstance(tile, int):
            choice = next(c for c in load(name).capability.gathers if c.block_q == tile and c.reads(p))
            cost, work = known.gather(name, choice), sample.gathers(tile)
            total = cost.column * work.columns + cost.pair * work.executed + cost.row * work.rows
        else:
            cost, work = known.tile(name, *tile), sample.tiles(*tile)
            total = cost.pair * work.executed + cost.bits * work.bits + cost.row * p.Q
        if p.H != 4:
            return start + p.H * total
        split = name == "triton" and q_offset > 2048
        return start + cost.step * work.longest / (1 + split) + combine * split

    monkeypatch.setattr(command.Bench, "seconds", seconds)
    monkeypatch.setattr(command.Bench, "bytes_a_second", lambda self: 4.35e12)
    monkeypatch.setattr(command, "chip_of", lambda device: Chip(90, 132))
    with everywhere():
        command.main(["--small", "--write", str(tmp_path)])
    after = read((tmp_path / "h200.json").read_text())
    assert [c._replace(value=0) for c in after.costs] == [c._replace(value=0) for c in before.costs]
    kept = [c for c in before.costs if c.by.startswith(command.CORRECTED)]
    assert [c for c in after.costs if c.by.startswith(command.CORRECTED)] == kept != []
    for size, backward in product(HEADS, (False, True)):
        with everywhere():
            plan = plan_of(replace(PROBLEM, D=size, E=size, backward=backward), backward=backward)
        new = DeviceCosts(after, 16, "backward" if backward else "forward", size, 132, True)
        found = [(new.tile(i.name, *tile[:2])[2:], tile[2:]) for i, tile in plan.options if i.name != "blocked"]
        found += [(new.gather(i.name, gather.choice)[1:], gather[1:]) for i, gather in plan.gather_options]
        for now, was in found:
            assert now == pytest.approx(was, rel=2e-3)


def test_numbers_are_fitted_by_their_counts(command) -> None:
    """Of made times, with the numbers that made them: 2 % of noise moves them little, and none is negative."""
    counts = [
        {"pair": 1e9, "row": 1e4},
        {"pair": 1e7, "row": 1e6},
        {"pair": 3e8, "row": 3e5},
        {"pair": 1e9, "row": 1e6},
    ]
    made = [
        (c, (1 + n) * (2e-12 * c["pair"] + 3e-9 * c["row"])) for c, n in zip(counts, (0.02, -0.02) * 2, strict=True)
    ]
    fitted = command.fit(made)
    assert fitted == pytest.approx({"pair": 2e-12, "row": 3e-9}, rel=0.05)
    assert command.fit([({"pair": 1.0, "row": 1.0}, 1.0), ({"pair": 1.0, "row": 2.0}, 0.5)])["row"] == 0.0


def test_a_measured_number_takes_the_place_of_the_one_before(command) -> None:
    one = Cost("triton", "pair", 1.0, "by hand", 16)
    file = File("x", 90, 132, (), {"16": "triton"}, (one, one._replace(head=64)))
    again = command.replaced(file, [one._replace(value=2.0, by="again"), one._replace(of="hopper")])
    assert again.costs == (one._replace(value=2.0, by="again"), one._replace(head=64), one._replace(of="hopper"))
    corrected = replace(file, costs=(one._replace(by="corrected, 3.0 measured: a row"),))
    assert command.replaced(corrected, [one._replace(value=2.0, by="again")]) == corrected


def test_two_files_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """Each case by the choice of each file; afterwards plans are made by the committed one."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare_costs

    given = tmp_path / "cpu.json"
    given.write_text((FOLDER / "cpu.json").read_text())
    compare_costs.main([str(given), "window", "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["window", "forward"], ["window", "backward"]]
    assert all("committed: blocked" in line and "given: blocked" in line for line in lines)
    with pytest.raises(SystemExit, match="no file of costs is called 'other': cpu, h200"):
        compare_costs.main([str(given.rename(tmp_path / "other.json")), "window", "--device", "cpu"])
    sys.modules.pop("compare_costs")
