"""Formulas as data: what the language takes, and that Python, JavaScript and the reader see one and the same."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipelinerl.planning.formulas import SECTIONS, SHEET
from pipelinerl.planning.inputs import INPUTS
from pipelinerl.planning.sheet import Row, Sheet
from tests.planning.runs import inputs_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _sheet(*rows: Row) -> Sheet:
    return Sheet(rows, inputs=["a", "b"])


def test_rows_are_computed_in_order_and_fixed_ones_are_not_looked_at() -> None:
    sheet = _sheet(Row("c", "", "a / b if b > 0 else 0", "x"), Row("d", "", "max(c, 2) ** 2 + ceil(a)", "y"))
    assert sheet.evaluate({"a": 1.5, "b": 0.5}) == {"a": 1.5, "b": 0.5, "c": 3.0, "d": 11.0}
    assert sheet.evaluate({"a": 1.5, "b": 0.0}, fixed={"c": 4.0})["d"] == 18.0


@pytest.mark.parametrize(
    ("formula", "told"),
    [
        ("a +", "invalid syntax"),
        ("later + 1", "later is no input and no earlier row"),
        ("a if b else __import__('os')", "no part of a formula"),
        ("a.real", "Attribute is no part of a formula"),
        ("abs(a)", "no part of a formula"),
        ("True", "no part of a formula"),
        ("a // b", "no part of a formula"),
    ],
)
def test_what_is_no_formula_is_refused(formula: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        _sheet(Row("c", "", formula, "x"), Row("later", "", "a", "y"))


def test_a_name_stands_once() -> None:
    with pytest.raises(ValueError, match="a stands twice"):
        _sheet(Row("a", "", "b", "x"))


def test_a_formula_is_shown_with_its_numbers() -> None:
    sheet = _sheet(Row("c", "", "max(a, 2) * b", "x"))
    assert sheet.numbers("c", {"a": 1.0, "b": 3000.0}, write=lambda value: f"{value:,.0f}") == "max(1, 2) * 3,000"
    assert sheet.operands("c") == ["a", "b"]


def test_sensitivity_by_hand() -> None:
    """c = a ** 2 / b: a 10 % up is 21 % up, b 10 % up is 1 / 1.1 - 1."""
    sheet = _sheet(Row("square", "", "a ** 2", "x"), Row("c", "", "square / b", "y"))
    found = sheet.sensitivity("c", {"a": 3.0, "b": 5.0}, of=["a", "b"])
    assert [name for name, _, _ in found] == ["a", "b"]
    assert found[0][1:] == pytest.approx((-0.19, 0.21))
    assert found[1][1:] == pytest.approx((1 / 0.9 - 1, 1 / 1.1 - 1))
    assert sheet.leaves("c") == {"a", "b"}
    assert sheet.sensitivity("square", {"a": 3.0, "b": 5.0}, of=["b"]) == []


def test_every_row_says_what_it_is_and_every_input_is_used() -> None:
    rows = [row for section in SECTIONS.values() for row in section]
    assert all(row.what and row.what[0] != " " for row in rows)
    used = {name for row in rows for name in SHEET.operands(row.name)}
    assert INPUTS.keys() - used == set()


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_browser_computes_what_python_does(tmp_path: Path) -> None:
    """300 runs drawn by a seed, dense and mixtures: every figure to 12 digits."""
    draw, cases = random.Random(19), []
    for _ in range(300):
        model = draw.choice(["Qwen2.5-7B", "Qwen3-30B-A3B", "DeepSeek-V3"])
        inputs = inputs_of(model, gpu=draw.choice(["h100", "b200"]))
        numbers = {
            name: value * draw.choice([0.5, 1.0, 3.0])
            for name, value in inputs.items()
            if name in ("mean_tokens", "row_tokens", "bandwidth")
        }
        sizes = {
            name: float(2 ** draw.randrange(4)) for name in ("shard", "context", "tensor", "pipeline", "expert", "engine_tensor", "engines")
        }
        mode = {
            "ranks": 64.0,
            "mode": float(draw.randrange(4)),
            "transport": float(draw.randrange(-1, 6)),
            "epochs": float(draw.randrange(1, 3)),
        }
        cases.append({**inputs, **numbers, **sizes, **mode})
    call = f"document.body.textContent = JSON.stringify({json.dumps(cases)}.map(evaluate))"
    (tmp_path / "page.html").write_text(f"<body></body><script>{SHEET.javascript()}</script><script>{call}</script>")
    command = [CHROMIUM or "", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    (written,) = re.findall(r"<body>(.*)</body>", done.stdout, re.DOTALL)
    for case, found in zip(cases, json.loads(written), strict=True):
        assert found == pytest.approx(SHEET.evaluate(case), rel=1e-12)
