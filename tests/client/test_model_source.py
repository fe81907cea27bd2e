"""Where a model comes from, as a user writes it, and which files of a repository that means."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.client.model_source import (
    HubPlace,
    choose,
    models_among,
    parse_source,
    quantisation,
)
from vram_conductor.protocol.catalogue import WheelPart
from vram_conductor.protocol.errors import ConductorError, InvalidArgument, NotFound


def place(
    repo: str = "o/r", path: str = "", quantisation: str = "", revision: str = "main"
) -> HubPlace:
    return HubPlace(repo=repo, revision=revision, path=path, quantisation=quantisation)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("hf:o/r", place()),
        ("hf:o/r:Q4_K_M", place(quantisation="Q4_K_M")),
        ("hf:o/r@v1.0:q8_0", place(quantisation="q8_0", revision="v1.0")),
        ("hf:o/r/sub/a.gguf", place(path="sub/a.gguf")),
        ("hf:o/r@c0ffee/a b.gguf", place(path="a b.gguf", revision="c0ffee")),
        ("https://huggingface.co/o/r", place()),
        ("https://huggingface.co/o/r/tree/main", place()),
        ("https://huggingface.co/o/r/blob/main/a.gguf", place(path="a.gguf")),
        (
            "https://hf.co/o/r/resolve/v1/q/a.gguf?download=true",
            place(path="q/a.gguf", revision="v1"),
        ),
        (
            "pypi:pkg-a==1.2/in/a.gguf",
            WheelPart(package="pkg-a", version="1.2", member="in/a.gguf"),
        ),
        ("./a.gguf", "./a.gguf"),
        ("/models/hf:o/a.gguf", "/models/hf:o/a.gguf"),
    ],
)
def test_what_is_meant(text: str, meant: HubPlace | WheelPart | str) -> None:
    assert parse_source(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hf:",
        "hf:o",
        "hf:o/r:",
        "hf:o/r@",
        "hf:o r/x",
        "pypi:p",
        "pypi:p==1",
        "pypi:--log==1/a.gguf",
        "pypi:p==-1/a.gguf",
        "https://e.org/o/r",
    ],
)
def test_what_is_no_source(text: str) -> None:
    with pytest.raises(InvalidArgument, match="hf:OWNER/REPO:Q4_K_M") as caught:
        parse_source(text)
    assert caught.value.reason == "bad_model_source"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("SmolLM2-360M-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2-0_5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("a/Llama-3.2-1B.IQ3_XXS.gguf", "IQ3_XXS"),
        ("m-UD-Q2_K_XL-00001-of-00003.gguf", "Q2_K_XL"),
        ("model-f16.gguf", "F16"),
        ("Q8_0.gguf", "Q8_0"),
        ("gpt-oss-mxfp4.gguf", "MXFP4"),
        ("Qwen3-0.6B.gguf", ""),
        ("model.gguf", ""),
    ],
)
def test_quantisation_by_name(path: str, name: str) -> None:
    assert quantisation(path) == name


FILES = [
    "README.md",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "big/m-f16-00001-of-00002.gguf",
    "big/m-f16-00002-of-00002.gguf",
    "m-Q2_K-00001-of-00002.gguf",
    "mmproj-m-f16.gguf",
]


def test_names_that_promise_more_parts_than_there_are_files_cost_nothing() -> None:
    """A repository may have thousands of them; looking for all parts would take minutes."""
    names = [f"m{number}-00001-of-99999.gguf" for number in range(20_000)]
    begin = time.thread_time()
    assert models_among(names) == {}
    assert time.thread_time() - begin < 5


def test_whole_models_only() -> None:
    assert models_among(FILES) == {
        "m-Q4_K_M.gguf": ["m-Q4_K_M.gguf"],
        "m-Q8_0.gguf": ["m-Q8_0.gguf"],
        "big/m-f16-00001-of-00002.gguf": FILES[3:5],
    }


@pytest.mark.parametrize(
    ("meant", "files"),
    [
        (place(quantisation="q4_k_m"), ["m-Q4_K_M.gguf"]),
        (place(path="m-Q8_0.gguf"), ["m-Q8_0.gguf"]),
        (place(quantisation="F16"), FILES[3:5]),
        (place(path=FILES[4]), FILES[3:5]),
    ],
)
def test_the_one_that_is_meant(meant: HubPlace, files: list[str]) -> None:
    assert choose(meant, FILES) == files
    assert choose(place(), [*files, "README.md"]) == files


@pytest.mark.parametrize(
    ("meant", "kind", "reason"),
    [
        (place(), InvalidArgument, "ambiguous_model"),
        (place(quantisation="Q5_0"), NotFound, "no_such_file"),
        (place(path="other.gguf"), NotFound, "no_such_file"),
        (place(path=FILES[5]), NotFound, "no_such_file"),  # its second part is missing
    ],
)
def test_what_is_not_one_is_refused_with_what_there_is(
    meant: HubPlace, kind: type[ConductorError], reason: str
) -> None:
    with pytest.raises(kind) as caught:
        choose(meant, FILES)
    assert caught.value.reason == reason
    assert "hf:o/r/m-Q4_K_M.gguf" in caught.value.info.message


def test_two_of_one_quantisation() -> None:
    with pytest.raises(InvalidArgument, match="2 models that fit"):
        choose(place(quantisation="Q8_0"), ["a-Q8_0.gguf", "b-Q8_0.gguf", "a-Q4_0.gguf"])


def test_many_are_not_all_listed() -> None:
    with pytest.raises(InvalidArgument, match="and 28 more"):
        choose(place(), [f"m{index}-Q8_0.gguf" for index in range(40)])


def test_none_at_all() -> None:
    with pytest.raises(NotFound, match="no whole GGUF model at all"):
        choose(place(), ["README.md"])


@given(st.text(max_size=40))
def test_any_text_is_a_source_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidArgument):
        parse_source(text)
    quantisation(text)
