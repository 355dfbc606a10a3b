"""Lines as columns of numbers, thinned and in order; and the words on an axis, as the script in the page writes them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipelinerl.observe.report import plots
from pipelinerl.observe.report.plots import Figure, Line, decimate
from scripts.bench.figure import write_lines

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_thinning_keeps_spikes_and_both_ends() -> None:
    points = [(float(x), 0.0) for x in range(10_000)]
    points[1234] = (1234.0, 9.0)
    points[7777] = (7777.0, -4.0)
    thin = decimate(points, limit=100)
    assert len(thin) <= 110
    assert {(1234.0, 9.0), (7777.0, -4.0), points[0], points[-1]} <= set(thin)
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)


def test_a_line_is_given_in_order_with_the_words_of_each_point() -> None:
    line = Line(name="a", colour="engine", points=[(2.0, 0.1), (1.0, 1 / 3)], says=["later", "earlier"])
    assert line.data() == {
        "name": "a",
        "colour": "engine",
        "style": "line",
        "x": [1.0, 2.0],
        "y": [0.33333, 0.1],
        "says": ["earlier", "later"],
    }


def test_a_figure_says_its_numbers_where_no_script_draws_it() -> None:
    line = Line(name="loss", colour="train", points=[(0, 3.0), (1, 5.0), (2, 1.0), (3, 2.0)])
    assert Figure(title="a", lines=[line, Line(name="none", colour="swap", points=[])]).summary() == [
        ("loss", "3.00", "1.00", "5.00", "2.00")
    ]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_words_of_a_tick_tell_it_from_its_neighbour(tmp_path: Path) -> None:
    expected = [
        (0.0, 5.0, "0"),
        (0.25, 0.25, "0.25"),
        (-0.0018, 0.0002, "-0.0018"),
        (12_000.0, 2_000.0, "12k"),
        (2_500.0, 2_500.0, "2.5k"),
        (2_500.0, 500.0, "2500"),
        (400_000.0, 100_000.0, "400k"),
        (3e6, 1e6, "3M"),
        (3.5e-5, 5e-6, "3.5e-5"),
        (2.5e-6, 2.5e-6, "2.5e-6"),
        (1e-13, 5e-14, "1.0e-13"),
    ]
    script = (Path(plots.__file__).parent / "templates" / "plots.js").read_text()
    call = f"document.body.textContent = JSON.stringify({json.dumps(expected)}.map(([value, step]) => tick(value, step)))"
    (tmp_path / "page.html").write_text(f"<body></body><script>{script}</script><script>{call}</script>")
    command = [CHROMIUM or "", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    (written,) = re.findall(r"<body>(.*)</body>", done.stdout)
    assert json.loads(written) == [words for _, _, words in expected]


def test_a_figure_of_the_readme_goes_through_its_points_and_escapes_its_names(tmp_path: Path) -> None:
    series = {"K = 0 <b>": [(0.0, 0.0), (5.0, 0.5), (10.0, 1.0)]}
    write_lines(tmp_path / "figure.svg", series, label="a & b", x_label="x", y_label="y")
    tree = ElementTree.parse(tmp_path / "figure.svg")
    (line,) = tree.iter("{http://www.w3.org/2000/svg}polyline")
    assert line.attrib["points"] == "50.0,260.0 290.0,145.0 530.0,30.0", "x from 50 to 530, y from 260 up to 30"
    assert {"K = 0 <b>", "a & b", "0.25", "10"} <= {element.text for element in tree.iter()}
