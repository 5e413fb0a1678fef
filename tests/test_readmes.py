"""What the READMEs show is what the tools print."""

import re
import sys

import pytest

from common.series import ROOT, stage_diff, stage_scripts

# Stage 09 is another algorithm: what it changes in stage 08 is nearly all of it.
LATER = sorted(number for number in stage_scripts() if number - 1 in stage_scripts() and number != 9)


@pytest.mark.parametrize("number", LATER)
def test_a_stage_readme_shows_the_current_diff(number: int) -> None:
    readme = (stage_scripts()[number].parent / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^```diff\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert shown, f"{number:02d}: the README has no ```diff block: put the output of `make diff-{number:02d}` there"
    assert shown.group(1) == stage_diff(number), f"replace the ```diff block by the output of `make diff-{number:02d}`"


@pytest.mark.parametrize("path", sorted(ROOT.glob("**/README.md")), ids=lambda path: path.parent.name)
def test_links_lead_somewhere(path) -> None:
    if any(part.startswith(".") for part in path.relative_to(ROOT).parts):
        pytest.skip("not ours")
    prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (path.parent / target).exists(), f"{path}: {target}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("0*/README.md")), ids=lambda path: path.parent.name)
def test_nothing_is_left_to_do(path) -> None:
    assert not re.search(r"TODO|FIXME|@@\w+@@", path.read_text(encoding="utf-8"))


def test_the_example_of_the_root_readme_runs(monkeypatch, capsys) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(import sys\n.*?)^```$", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(compile(example, "README.md", "exec"), {"__name__": "example"})
    assert float(capsys.readouterr().out.split()[-1]) < 5e-3
