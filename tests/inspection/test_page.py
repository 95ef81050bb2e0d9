"""A report as one HTML file: well-formed, self-contained, complete, and as a browser shows it."""

import html.parser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from dbrq.inspection import plots
from tests import ROOT
from tests.helpers.models import Call
from tests.helpers.running import convert

pytest.importorskip("jinja2", reason="dbrq[report] is not installed")
pytest.importorskip("matplotlib", reason="dbrq[report] is not installed")


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "link", "input", "br"}
#: Of attributes, what a browser fetches.
FETCHED = ("src", "href", "srcset", "data", "action", "poster", "xlink:href")


class Page(html.parser.HTMLParser):
    """A page's elements, and what is wrong with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.headings: list[str] = []
        self.rows = 0
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.rows += tag == "tr"
        for name, value in attrs:
            if name in FETCHED:
                self.fetched.append(value)
            if name == "id":
                self.ids.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def checked(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.problems
    assert all(value == "data:," or value.startswith("#") for value in page.fetched), page.fetched
    assert "http" not in text and "@import" not in text
    assert all(value.startswith("#") for value in re.findall(r"url\((.*?)\)", text))
    assert len(page.ids) == len(set(page.ids)), "names are unique"
    referred = {v[1:] for v in page.fetched if v.startswith("#")} | set(re.findall(r"url\(#(.*?)\)", text))
    assert referred <= set(page.ids)
    return page


class Branching(nn.Module):
    """Convolutions, a sum, a path that is not always taken, and an op in float."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.a(x))
        if x.mean() > 0.4:
            x = x + self.b(x)
        return self.head(x.std((2, 3)))


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    model, x = Branching().eval(), torch.randn(2, 3, 8, 8)
    prepared = dbrq.prepare(model, x)
    for scale in (0.1, 1.0, 3.0):
        prepared(scale * x)
    return model, prepared, dbrq.convert(prepared), x


@pytest.fixture(scope="module")
def full(models, tmp_path_factory) -> Path:
    """With all that was found."""
    model, _, quantized, x = models
    path = tmp_path_factory.mktemp("page") / "report.html"
    dbrq.report(quantized).save(
        path, compare=dbrq.compare(model, quantized, x), profile=dbrq.profile(quantized, x, repeats=2)
    )
    return path


# What is on it


def test_a_full_page(full, models):
    page = checked(full)
    assert page.headings == [
        "What to do next", "Kinds of ops", "Error of each op", "Time, measured", "Ranges of int8 activations",
        "All ops", "Graph", "Paths", "Environment",
    ]  # fmt: skip
    words = " ".join(page.words)
    for said in ("Branching, converted", torch.__version__, dbrq.__version__, "accumulated: as it runs", "local",
                 "floats to integers and back", "no longer has them", "std"):  # fmt: skip
        assert said in words, said
    assert full.stat().st_size < 200_000


def test_without_what_else_was_found(models, tmp_path):
    _, _, quantized, _ = models
    dbrq.report(quantized).save(tmp_path / "report.html")
    page = checked(tmp_path / "report.html")
    assert "Error of each op" not in page.headings and "Time, estimated" in page.headings


def test_a_prepared_model_shows_histograms(models, tmp_path):
    dbrq.report(models[1]).save(str(tmp_path / "report.html"))
    page = checked(tmp_path / "report.html")
    assert "Values of calibration (logarithmic counts)" in " ".join(page.words)


@pytest.mark.parametrize("backend", ["torchscript", "onednn"])
def test_lowered_models(backend, tmp_path):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 8)
    try:
        lowered = dbrq.lower(convert(model, x).quantized, x, backend=backend)
    except dbrq.OneDNNError:
        pytest.skip("libdnnl is not installed")
    profile = dbrq.profile(lowered, x, repeats=1)
    dbrq.report(lowered).save(tmp_path / "report.html", profile=profile)
    page = checked(tmp_path / "report.html")
    assert "Time, measured" in page.headings or "names kernels, not ops" in " ".join(page.words)
    assert "Ranges of int8 activations" in page.headings


def test_names_are_text_and_no_elements(tmp_path):
    name = "<img src=x onerror=alert(1)>&\"'$x_1$"
    model = Call(lambda m, x: getattr(m, name)(x), **{name: nn.Linear(4, 4)})
    models, x = convert(model, torch.randn(2, 4)), torch.randn(2, 4)
    for number, each in enumerate((models.prepared, models.quantized)):
        dbrq.report(each).save(tmp_path / f"{number}.html", compare=dbrq.compare(model, models.quantized, x))
        page = checked(tmp_path / f"{number}.html")
        assert "<img" not in (tmp_path / f"{number}.html").read_text() and name in "".join(page.words)
        assert "".join(page.words).count("$x_1$") >= 4, "in plots, too, where others read mathematics"


def test_models_with_little_to_show(tmp_path):
    x = torch.randn(2, 4)
    same = nn.Sequential(nn.Linear(4, 4)).eval()
    for number, model in enumerate((nn.Identity(), nn.Sequential(nn.Sigmoid()), nn.Sequential(nn.Linear(4, 4)))):
        mapping = dbrq.default_qconfig_mapping().set_object_type(nn.Linear, None)
        quantized = convert(model, x, mapping).quantized
        path = tmp_path / f"{number}.html"
        compare = dbrq.compare(same, same, x)  # of equal models: no finite error
        dbrq.report(quantized).save(path, compare=compare, profile=dbrq.profile(quantized, x, repeats=1))
        checked(path)


def test_constant_activations_have_no_histogram(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 4)
    dbrq.report(convert(model, x).prepared).save(tmp_path / "report.html")
    checked(tmp_path / "report.html")


def test_the_users_plots_are_left_alone(models, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    dbrq.report(models[2]).save(tmp_path / "report.html")
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


# Errors


def test_the_users_style_stays_out_of_the_page():
    import matplotlib

    def drawn():
        return re.sub(r"\bs[0-9a-f]+-\w+", "", plots.bars(["linear"], [1.0], ["#010102"], "time"))  # without ids

    plain = drawn()
    with matplotlib.rc_context({"axes.grid": True, "font.size": 20, "patch.linewidth": 5, "figure.facecolor": "red"}):
        assert drawn() == plain


def test_what_save_does_not_take(models, tmp_path):
    _, _, quantized, _ = models
    report = dbrq.report(quantized)
    for wrong in ({"compare": dbrq.compare}, {"profile": "fast"}):
        with pytest.raises(dbrq.ConfigurationError, match="save takes what"):
            report.save(tmp_path / "report.html", **wrong)
    with pytest.raises(dbrq.ConfigurationError, match="cannot be written"):
        report.save(tmp_path / "no" / "folder" / "report.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_the_extra_it_says_what_to_install(models, tmp_path, monkeypatch, missing):
    for name in list(sys.modules):
        if name == missing or name.startswith(f"{missing}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(dbrq.ConfigurationError, match=r"pip install dbrq\[report\]"):
        dbrq.report(models[2]).save(tmp_path / "report.html")


def test_neither_is_imported_before_it_is_needed():
    code = "import dbrq, sys; assert not {'jinja2', 'matplotlib', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_a_wheel_holds_the_template(tmp_path):
    pytest.importorskip("setuptools", minversion="64")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "dbrq", source / "dbrq", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True)
    if "bdist_wheel" in done.stderr and done.returncode:
        pytest.skip("this setuptools makes no wheels")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "dbrq/inspection/page.html.jinja" in archive.namelist()
        points = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "dbrq = dbrq.command_line:main" in archive.read(points).decode()


# As a browser shows it

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def browse(path: Path, *options: str) -> str:
    """The document as Chromium has it when it is loaded."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--user-data-dir={path.parent / 'profile'}", *options]  # fmt: skip
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"Chromium does not run here: {done.stderr[-300:]}")
    return done.stdout


def with_script(page: Path, script: str) -> Path:
    changed = page.with_name("with_script.html")
    changed.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    return changed


@needs_browser
def test_the_table_sorts_and_filters(full):
    script = """
    var out = [], rows = function () { return Array.from(document.querySelectorAll("#ops tbody tr")); };
    var column = function (name) {
      var heads = Array.from(document.querySelectorAll("#ops th button"));
      return heads.findIndex(function (head) { return head.textContent === name; });
    };
    var press = function (name) {
      document.querySelectorAll("#ops th button")[column(name)].click();
      return rows().map(function (row) { return row.cells[column(name)].textContent; });
    };
    out.push(press("MMACs"), press("MMACs"), press("local"), press("path"));
    var filter = document.getElementById("filter");
    filter.value = "HEAD";
    filter.dispatchEvent(new Event("input"));
    out.push(rows().filter(function (row) { return row.offsetHeight > 0; }).length);
    document.body.dataset.found = JSON.stringify(out);
    """
    import html
    import json

    found = re.search(r'data-found="(.*?)"', browse(with_script(full, script), "--dump-dom"))
    up, down, local, paths, left = json.loads(html.unescape(found[1]))

    def numbers(cells):
        return [float(cell) for cell in cells if cell]

    assert numbers(up) == sorted(numbers(up)) and numbers(down) == sorted(numbers(down), reverse=True)
    assert numbers(local) == sorted(numbers(local)) and len(numbers(up)) > 2
    assert [not cell for cell in down] == sorted(not cell for cell in down), "what is unknown comes last"
    assert paths == sorted(paths, key=str.lower) or len(paths) == len(up)
    assert left == 1


@needs_browser
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_screen(full, width):
    frame = full.with_name("frame.html")
    script = "parent.postMessage(document.documentElement.scrollWidth, '*');"
    inner = with_script(full, script)
    frame.write_text(
        f"<body><script>onmessage = function (e) {{ document.body.dataset.width = e.data; }};</script>"
        f"<iframe src='{inner.name}' style='width:{width}px;height:900px;border:0'></iframe></body>"
    )
    dom = browse(frame, "--dump-dom", "--window-size=1400,1000", "--allow-file-access-from-files")
    assert int(re.search(r'data-width="(\d+)"', dom)[1]) <= width


@needs_browser
def test_light_and_dark(full):
    from PIL import Image

    shown = {}
    for scheme, name in ((1, "light"), (0, "dark")):
        picture = full.with_name(f"{name}.png")
        browse(
            full, f"--screenshot={picture}", "--window-size=800,1200", f"--blink-settings=preferredColorScheme={scheme}"
        )
        shown[name] = Image.open(picture).convert("L")
    assert shown["light"].getpixel((2, 2)) > 240 and shown["dark"].getpixel((2, 2)) < 40
    for picture in shown.values():
        assert len(set(picture.resize((80, 120)).tobytes())) > 20, "something is there"


class Encoder(nn.Module):
    """As many ops as a ViT-B/16 has: 12 layers of attention and two linear layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({
            "norm_before_attention": nn.LayerNorm(width), "attention_qkv": nn.Linear(width, 3 * width),
            "attention_out": nn.Linear(width, width), "norm_before_mlp": nn.LayerNorm(width),
            "mlp_up": nn.Linear(width, 4 * width), "mlp_down": nn.Linear(4 * width, width),
        }) for _ in range(12))  # fmt: skip

    def forward(self, x):
        for layer in self.layers:
            q, k, v = layer["attention_qkv"](layer["norm_before_attention"](x)).chunk(3, -1)
            x = x + layer["attention_out"](F.scaled_dot_product_attention(q, k, v))
            x = x + layer["mlp_down"](F.gelu(layer["mlp_up"](layer["norm_before_mlp"](x))))
        return x


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    model, x = Encoder().eval(), torch.randn(1, 7, 32)
    models = convert(model, x)
    path = tmp_path_factory.mktemp("large") / "report.html"
    dbrq.report(models.prepared).save(path, compare=dbrq.compare(model, models.quantized, x))
    return path


def test_the_page_of_a_large_model_is_small(large):
    assert checked(large).rows > 130 and large.stat().st_size < 1_000_000


@needs_browser
def test_the_page_of_a_large_model_opens_in_a_second(large):
    script = (
        "document.body.offsetHeight;"  # lays it out
        "document.body.dataset.ms = Math.ceil(performance.now());"
    )
    taken = [int(re.search(r'data-ms="(\d+)"', browse(with_script(large, script), "--dump-dom"))[1]) for _ in range(3)]
    assert min(taken) < 1000
