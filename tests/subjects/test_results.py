"""What verbs answer with: shown, drawn and written alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.records import Result, tables
from mha_haiku.showing import canvas, result_files
from mha_haiku.subjects import answers


@pytest.fixture(scope="module")
def four_letters():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"table": jax.random.normal(keys[0], (4, 6))}
    params |= {
        x: jax.random.normal(y, (6, 2, 3)) for x, y in zip("qkv", keys[1:], strict=True)
    }

    def run(params, tokens):
        x = params["table"][tokens]
        made = [jnp.einsum("btd,dhk->bthk", x, params[n]) for n in "qkv"]
        x += mh.attend(*made, mask=mh.masks.causal())[0].reshape(x.shape)
        return x @ params["table"].T

    return mh.wrap(run, params, examples=np.arange(12).reshape(2, 6) % 4)


class Sizes(Result):
    title, file_name = "Sizes of <parts>", "sizes"

    def table(self):
        columns = tables.Column("part"), tables.Column("size", "MB", "{:.1f}")
        return tables.Table(columns, [{"part": "heads", "size": 2.25}])

    @property
    def picture(self):
        return functools.partial(canvas.sheet, 3, 2, title=self.title)


def test_a_result_of_somebody_is_shown_and_drawn():
    found = Sizes()
    assert repr(found) == "Sizes('Sizes of <parts>')"
    for html in (found._repr_html_(), str(mh.show(found)._repr_html_())):
        assert "Sizes of &lt;parts&gt;" in html
        assert "heads" in html and "2.2" in html
    assert found.plot().get_suptitle() == mh.plot(found).get_suptitle() == found.title


def test_formats_are_one_or_several_in_any_case(tmp_path):
    found = Sizes()
    paths = found.save(tmp_path / "one", "svg") + found.save(tmp_path, ["PNG", "pdf"])
    paths += found.save(tmp_path / "its.SVG") + found.save(tmp_path / "its.CSV")
    names = ["sizes.csv", "sizes.svg", "sizes.csv", "sizes.png", "sizes.pdf"]
    assert [path.name for path in paths] == [*names, "its.SVG", "its.CSV"]
    assert paths[-2].read_bytes() == paths[1].read_bytes()
    assert paths[-1].read_bytes() == paths[0].read_bytes()
    assert paths[4].read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("formats", ["bmp", ("png", "p"), ["svg", 3], ".png"])
def test_nothing_is_written_if_a_format_is_unknown(formats, tmp_path):
    with pytest.raises(ValueError, match=r"formats must be one of .*pdf, .*; got "):
        Sizes().save(tmp_path / "new", formats)
    with pytest.raises(ValueError, match="formats must be one of"):
        result_files.write_pictures(tmp_path / "x.png", Sizes().picture, formats)
    assert not any(tmp_path.iterdir())


_TEXTS = np.array([[0, 1, 2, 3, 0]]), np.array([[0, 1, 3, 3, 0]])
_RESULTS = {
    "compositions": lambda x: answers.Compositions("k", np.ones((2, 2, 2, 2))),
    "importance": lambda x: x.importance("ablation"),
    "lens": lambda _: answers.Lens(
        ("a", "b"), np.array([["x", "y"]]), np.full((1, 2), 0.5), np.zeros((1, 2, 3))
    ),
    "paths": lambda x: x.paths(*_TEXTS, answers=(1, 2)),
    "patching": lambda x: x.patch(*_TEXTS, answers=(1, 2)),
    "reads": lambda x: x.reads(),
    "strongest": lambda x: x.strongest(0, 1),
    "why": lambda x: x.why(_TEXTS[0], layer=0, head=0),
    "writes": lambda x: x.writes(_TEXTS[0], layer=0, head=0),
}


@pytest.mark.parametrize("name", _RESULTS)
def test_every_answer_is_shown_drawn_and_written(four_letters, tmp_path, name):
    found = _RESULTS[name](four_letters)
    assert len(found.text().splitlines()) > len(found.rows()) > 0
    assert "nan" not in found.text() + repr(found)
    assert found.title and found._repr_html_() and mh.show(found).html
    table, picture = found.save(tmp_path)[:2]
    assert len(table.read_text().splitlines()) == 1 + len(found.rows())
    assert picture.read_bytes().startswith(b"\x89PNG")
    (one,) = found.save(tmp_path / "one.SVG")
    assert b"<svg" in one.read_bytes()
