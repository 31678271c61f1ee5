"""report.html of real runs: the same numbers from every kind of log, no empty section, errors that name the file."""

import html.parser
import json
import math
import re
import shutil

import pytest

from megatron_ciera import metrics
from megatron_ciera.param_gather.selection import ClassStats, Decision, Row, format_table
from megatron_ciera.report import cli
from megatron_ciera.report.console_log import ConsoleLog
from tests.launching import TINY, launch

# Sequences and vocabulary long enough that mock data routes unevenly, and a fit at iteration 1 moves experts at 6.
LENGTHS = (
    "--seq-length 512 --max-position-embeddings 512 --vocab-size 1023 --train-iters 2000 --exit-interval 8"
)
FIT = "--correlated-placement --placement-fit-iteration 1 --placement-fit-tokens 1024 --placement-refit-interval 0"
EVERYTHING = f"--ciera --ciera-warmup-iters 2 {FIT}"
OURS = ("Parameter gather", "Decisions of selection", "Dispatch of tokens", "Layers", "What the run said")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of two runs, each with log.txt, tensorboard/ and what was observed."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("reported")
    for name, flags in (("stock", ""), ("ours", EVERYTHING)):
        words = [
            *TINY,
            *LENGTHS.split(),
            "--expert-model-parallel-size",
            "2",
            "--clip-grad",
            "0",
            *flags.split(),
        ]
        words += ["--tensorboard-dir", folder / name / "tensorboard", "--log-timers-to-tensorboard"]
        run = launch(folder / name, 2, words).check()
        (folder / name / "log.txt").write_text(run.output)
    return folder


@pytest.fixture
def report(tmp_path, capsys):
    """Runs the command line; returns the JSON object and the page."""

    def write(*words):
        page = tmp_path / "report.html"
        assert cli.main([*map(str, words), "--output", str(page), "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out), page.read_text()

    return write


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs the command line, which must end with 2 and leave the page of an earlier call alone; its message."""

    def write(*words):
        page = tmp_path / "kept.html"
        page.write_text("an earlier page")
        assert cli.main([*map(str, words), "--output", str(page)]) == 2
        assert page.read_text() == "an earlier page"
        return capsys.readouterr().err

    return write


def observed(folder):
    return [json.loads(line) for line in (folder / "iterations.jsonl").read_text().splitlines()]


def headings(page):
    return re.findall(r"<h2>(.*?)</h2>", page)


class Page(html.parser.HTMLParser):
    """Everything that a page would load from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.images = [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href", "srcset", "data") and not value.startswith("data:image/png;base64,"):
                self.loaded.append((tag, value))
        self.images += tag == "img"
        if tag in ("script", "link", "iframe"):
            self.loaded.append((tag, None))


def test_a_run_against_its_baseline(runs, report):
    found, page = report(runs / "ours", "--baseline", runs / "stock")
    records = observed(runs / "ours")
    assert found["losses"]["source"] == "observed" and found["losses"]["iterations"] == 8
    assert (
        found["losses"]["loss_max_abs_diff"] == 0.0 and found["losses"]["first_different_iteration"] is None
    )
    assert found["losses"]["bitwise_identical"] is None  # runs that end by --exit-interval leave no digests
    sums = {
        name: sum(r["metrics"][f"ciera/{name}"] + r.get("tail", {}).get(f"ciera/{name}", 0) for r in records)
        for name in ("bytes_raw", "bytes_sent")
    }
    assert {name: found["ciera"][name] for name in sums} == sums
    assert found["ciera"]["ratio"] == sums["bytes_sent"] / sums["bytes_raw"] < 1
    assert found["moe"]["placements_moved_after"] == [6]
    after = [r["metrics"] for r in records if r["iteration"] > 6]
    assert found["moe"]["rows_removed"] == pytest.approx(sum(m["moe/rows_removed"] for m in after) / 2)
    assert found["moe"]["layers"]["rank_load"].keys() == {"layer_0", "layer_1"}
    layers = found["moe"]["layers"]["locality"]
    assert layers["layer_1"] == pytest.approx(sum(m["moe/locality/layer_1"] for m in after) / 2)
    assert {row["kind"] for decision in found["selection"] for row in decision["rows"]} >= {"attention"}
    assert headings(page) == ["In short", "Losses", "Time per step", *OURS, "Files"]
    shown = Page(page)
    assert not shown.loaded and shown.images == 10
    assert "equal in every bit" in page and "applied after iteration 6" in page


def test_the_console_log_alone_has_the_same_numbers(runs, report):
    exact, _ = report(runs / "ours", "--baseline", runs / "stock")
    found, page = report(runs / "ours" / "log.txt", "--baseline", runs / "stock" / "log.txt")
    assert found["losses"]["source"] == "console" and found["losses"]["loss_max_abs_diff"] == 0.0
    assert found["losses"]["bitwise_identical"] is None and "equal in every printed digit" in page
    for name in ("bytes_raw", "bytes_sent", "raw_fallbacks"):
        assert found["ciera"][name] == exact["ciera"][name]
    assert found["moe"]["rows_sent"] == exact["moe"]["rows_sent"]
    for metric, layers in exact["moe"]["layers"].items():
        assert found["moe"]["layers"][metric] == pytest.approx(layers, rel=1e-3)
    assert found["selection"] == exact["selection"]
    assert headings(page) == ["In short", "Losses", "Time per step", *OURS, "Files"]


def test_tensorboard_events_alone_have_the_same_numbers(runs, report):
    pytest.importorskip("tensorboard")
    exact, _ = report(runs / "ours")
    found, page = report(runs / "ours" / "tensorboard", "--baseline", runs / "stock" / "tensorboard")
    assert found["losses"]["source"] == "tensorboard" and found["losses"]["loss_max_abs_diff"] == 0.0
    assert found["losses"]["names"][0] == "lm loss" and found["losses"]["iterations"] == 8
    assert found["moe"]["rows_sent"] == exact["moe"]["rows_sent"]
    assert found["seconds_per_step"] == pytest.approx(exact["seconds_per_step"], abs=1e-4)
    assert "Layers" in headings(page) and "Decisions of selection" not in headings(page)


def test_a_run_without_our_flags_has_no_empty_section(runs, report):
    found, page = report(runs / "stock" / "log.txt")
    assert headings(page) == ["In short", "Losses", "Time per step", "What the run said", "Files"]
    assert found["ciera"] is found["moe"] is found["selection"] is found["losses"] is None


def test_a_run_with_one_feature_has_its_sections_only(runs, report, tmp_path):
    lines = (runs / "ours" / "log.txt").read_text().splitlines(keepends=True)
    (tmp_path / "gather.log").write_text("".join(line for line in lines if "moe/" not in line))
    found, page = report(tmp_path / "gather.log")
    assert found["moe"] is None and not {"Dispatch of tokens", "Layers"} & set(headings(page))
    placed = [line for line in lines if "selection," not in line and "%" not in line]
    (tmp_path / "placed.log").write_text("".join(placed).replace("ciera/", "other/"))
    found, page = report(tmp_path / "placed.log")
    assert found["ciera"] is None and not {"Parameter gather", "Decisions of selection"} & set(headings(page))


@pytest.mark.parametrize("on_cpu", ["run and baseline", "run", "baseline", ""])
def test_times_of_a_cpu_are_said_to_be_such(runs, tmp_path, capsys, on_cpu):
    for name, folder in (("run", "stock"), ("baseline", "ours")):
        lines = (runs / folder / "log.txt").read_text().splitlines(keepends=True)
        kept = [line for line in lines if name in on_cpu or "no GPU" not in line]
        (tmp_path / f"{name}.log").write_text("".join(kept))
    words = ["run.log", "--baseline", "baseline.log", "--output", "page.html"]
    assert cli.main([str(tmp_path / word) if "." in word else word for word in words]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "seconds per step" in line]
    page = (tmp_path / "page.html").read_text()
    assert (f" {on_cpu} on CPU, which says nothing about a GPU" in line) == bool(on_cpu)
    assert ("its times say nothing about GPUs" in page) == ("run" in on_cpu)


def test_whether_a_run_was_on_cpu_is_not_known_without_its_console(runs, tmp_path, report):
    found, _ = report(runs / "ours" / "iterations.jsonl")
    assert found["run"]["on_cpu"] is None and report(runs / "ours" / "log.txt")[0]["run"]["on_cpu"] is True


def test_differences_are_measured_and_drawn(runs, report, tmp_path):
    text = (runs / "stock" / "log.txt").read_text()
    changed = re.sub(r"(iteration +5/.*lm loss: )\S+", r"\g<1>1.000000E+00", text)
    nan = re.sub(r"(iteration +7/.*lm loss: )\S+", r"\g<1>NAN", changed)
    (tmp_path / "changed.log").write_text(nan)
    found, page = report(tmp_path / "changed.log", "--baseline", runs / "stock" / "log.txt")
    assert found["losses"]["first_different_iteration"] == 5
    assert found["losses"]["loss_max_abs_diff"] == math.inf
    assert "Difference of lm loss" in page


def bad_logs(runs, folder):
    """(words, what the message says) for each bad input, by name."""
    text = (runs / "stock" / "log.txt").read_text()
    files = {
        "empty": " \n",
        "binary": "PK\3\4\0\0\0\0",
        "other": "epoch 1: loss 0.3\nepoch 2: loss 0.2\n",
        "truncated": text[: text.index("iteration        6/") + 130],
        "stopped": text[: text.index(" iteration        1/")],
        "later": re.sub(r"iteration +(\d)/", r"iteration     40\1/", text),
        "json": json.dumps({"format": "megatron-ciera-placement"}),
    }
    for name, content in files.items():
        (folder / f"{name}.log").write_text(content)
    path = {name: folder / f"{name}.log" for name in files}
    (folder / "nothing").mkdir()
    (folder / "damaged").mkdir()
    shutil.copy(runs / "stock" / "iterations.jsonl", folder / "damaged")
    with open(folder / "damaged" / "iterations.jsonl", "r+") as file:
        file.truncate(1000)
    (folder / "both" / "with").mkdir(parents=True)
    shutil.copy(runs / "ours" / "iterations.jsonl", folder / "both" / "with")
    stock = runs / "stock" / "log.txt"
    (folder / "linked.log").hardlink_to(stock)
    return {
        "missing": ([folder / "no.log"], "no such file"),
        "empty": ([path["empty"]], "is empty"),
        "binary": ([path["binary"]], "binary file"),
        "other program": ([path["other"]], "no line of Megatron's"),
        "truncated": ([path["truncated"]], "ends after iteration 5 of 2000"),
        "stopped at start": ([path["stopped"]], "no logged iteration"),
        "a JSON of ours": ([path["json"]], "or this is not the console log of a training run"),
        "a second name": ([stock, "--baseline", folder / "linked.log"], "found the run itself"),
        "no overlap": ([stock, "--baseline", path["later"]], "1 to 8"),
        "against itself": ([runs / "stock", "--baseline", stock], "found the run itself"),
        "baseline empty": ([stock, "--baseline", path["empty"]], "is empty"),
        "other sources": (
            [runs / "stock" / "iterations.jsonl", "--baseline", stock],
            "Give the console logs",
        ),
        "folder without logs": ([folder / "nothing"], "no log of a run"),
        "folder of a comparison": (
            [folder / "both"],
            f"Name the folder of one run ({folder / 'both' / 'with'})",
        ),
        "damaged observations": ([folder / "damaged"], "damaged or cut off"),
    }


BAD = (
    "missing|empty|against itself|binary|other program|truncated|stopped at start|no overlap|baseline empty|"
)
BAD += "a JSON of ours|a second name|other sources|folder without logs|folder of a comparison|damaged observations"


@pytest.mark.parametrize("case", BAD.split("|"))
def test_bad_input_is_named_and_nothing_is_written(runs, tmp_path, refused, case):
    words, text = bad_logs(runs, tmp_path)[case]
    message = refused(*words)
    assert ": error: " in message and message.count("\n") == 1
    assert text in message and str(words[-1]) in message


def test_a_log_cut_inside_a_number_is_read_up_to_the_last_whole_line(runs, tmp_path, report):
    text = (runs / "ours" / "log.txt").read_text()
    place = text.index("ciera/bytes_sent: ", text.index("[megatron-ciera] iteration        6"))
    (tmp_path / "cut.log").write_text(text[: place + len("ciera/bytes_sent: 1")])
    found, _ = report(tmp_path / "cut.log", "--unfinished", "--baseline", runs / "stock" / "log.txt")
    records = observed(runs / "ours")[:5]
    assert found["ciera"]["bytes_sent"] == sum(r["metrics"]["ciera/bytes_sent"] for r in records)
    assert found["losses"]["last"] == 6


def test_lines_of_ours_are_read_as_they_are_written():
    values = {"ciera/bytes_sent": 12345678901, "ciera/ratio": 0.21671, "moe/rank_load/layer_10": 1.23456}
    values |= {
        "moe/rank_load/layer_2": 2.0,
        "moe/rank_load/mtp_0_1": 1.5,
        "ciera/raw_fallbacks/invalidated": 2,
    }
    row = Row("expert", 3, 2, ClassStats(100, 0, 7, 10, 9), ("delta", "exponent-reuse"), 0.25, -1234.56e-6)
    raw = Row("norm", 1, 0, ClassStats(), (), 1.0, 0.0)
    table = format_table("dense buckets of optimizer 0, 4 ranks", Decision({}, (row, raw), in_seconds=True))
    lines = [metrics.console_line(7, values), metrics.layers_line(7, values)]
    lines += [f"[default0]:megatron-ciera: {line}" for line in table]
    log = ConsoleLog()
    log.read("\n".join(lines) + "\n")
    for name, value in values.items():
        assert log.metrics[name][7] == pytest.approx(value, rel=1e-3)
    assert log.metrics["ciera/bytes_sent"][7] == 12345678901
    (decision,) = log.decisions
    assert (decision.group, decision.unit) == ("dense buckets of optimizer 0, 4 ranks", "us")
    assert [(r.kind, r.segments, r.compressed, r.codec) for r in decision.rows] == [
        ("expert", 3, 2, "delta, exponent-reuse"),
        ("norm", 1, 0, "raw"),
    ]
    assert decision.rows[0].gain == pytest.approx(-1234.6)
    assert (decision.rows[0].exponents_changed, decision.rows[0].blocks_changed) == (0.07, 0.9)


def test_a_repeated_iteration_counts_once():
    """Two attempts in one log: the second began at a checkpoint."""
    line = (
        " [time] iteration {}/       4 | elapsed time per iteration (ms): {}.0 | lm loss: {}.000000E+00 |\n"
    )
    log = ConsoleLog()
    log.read("".join(line.format(i, 10 * i, i) for i in (1, 2, 3)))
    log.read("".join(line.format(i, 10 * i, 9) for i in (3, 4)))
    assert log.losses["lm loss"] == {1: 1.0, 2: 2.0, 3: 9.0, 4: 9.0}
    assert log.reached_its_end
