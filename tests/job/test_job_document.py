"""YAML as the job file has it: scalars of YAML 1.2, places, limits, and writing what is read back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_ddp.job.document import MAX_BYTES, Place, dump, parse, plain, read_document
from cluster_ddp.job.errors import JobFileError

PLACE = Place(Path("job.yaml"))

SCALARS = {
    # What YAML 1.1 reads differently comes first.
    "12:00:00": "12:00:00",
    "1e-3": 0.001,
    "0123": 123,
    "no": "no",
    "off": "off",
    "Yes": "Yes",
    "0b11": "0b11",
    "1_000": "1_000",
    "2024-01-01": "2024-01-01",
    "=": "=",
    "0o17": 15,
    "017": 17,
    "0x1F": 31,
    "-7": -7,
    "+7": 7,
    "1.": 1.0,
    ".5": 0.5,
    "1E3": 1000.0,
    "true": True,
    "False": False,
    "TRUE": True,
    "tRUE": "tRUE",
    "~": None,
    "Null": None,
    "": None,
    "-": None,
    "1.2.3": "1.2.3",
    "+-1": "+-1",
    "1e": "1e",
    "'12'": "12",
    '"true"': "true",
}


@pytest.mark.parametrize(("text", "value"), [item for item in SCALARS.items() if item[0] != "-"])
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read = plain(parse(f"key: {text}\n", PLACE))["key"]
    assert read == value
    assert type(read) is type(value)


def test_every_value_knows_its_line() -> None:
    node = parse("# a comment\nname: x\n\ntrain:\n  lr: 1\n  list:\n    - a\n    - b\n", PLACE)
    assert isinstance(node.value, dict)
    train = node.value["train"]
    assert isinstance(train.value, dict)
    assert (node.value["name"].place.line, train.place.line, train.value["lr"].place.line) == (2, 4, 5)
    assert isinstance(train.value["list"].value, list)
    assert [item.place.line for item in train.value["list"].value] == [7, 8]


def test_aliases_are_read() -> None:
    assert plain(parse("a: &x {b: [1]}\nc: *x\n", PLACE)) == {"a": {"b": [1]}, "c": {"b": [1]}}


REFUSED = {
    "a: 1\nb: 2\na: 3\n": (3, "given twice, first on line 1"),
    "x:\n  a: 1\n  a: 2\n": (3, "given twice, first on line 2"),
    "a: [1, 2\n": (1, "not YAML"),
    "a: 'x\n": (1, "not YAML"),
    "ok: 1\na: b: c\n": (2, "not YAML"),
    "ok: 1\na: \x01\n": (2, "does not allow"),
    "é: ü\na: \x01\n": (2, "does not allow"),
    "a: !!python/object/apply:os.system [id]\n": (1, "the tag"),
    "a: !mine x\n": (1, "the tag"),
    "a: 1\n---\nb: 1\n": (2, "second YAML document"),
    "? [a]\n: 1\n": (1, "a key that is not"),
    "<<: {a: 1}\n": (1, "merge key"),
    "a: *nowhere\n": (1, "no anchor"),
    "a: &a [*a]\n": (1, "no anchor"),
    "a: .inf\n": (1, "a: .inf is not a finite number"),
    "b: {x: 1}\ntrain:\n  lr: .nan\n": (3, "train.lr: .nan is not a finite number"),
    "a: .NaN\n": (1, "not a finite number"),
    "a: -1e999\n": (1, "not a finite number"),
    "a: " + "9" * 5000: (1, "5000 digits"),
    "a: " + "[" * 100_000: (1, "nested too deep"),
    "{a: " * 100_000: (1, "nested too deep"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_names_its_line(text: str) -> None:
    line, message = REFUSED[text]
    with pytest.raises(JobFileError) as caught:
        parse(text, PLACE)
    assert str(caught.value).startswith(f"job.yaml:{line}: ")
    assert message in str(caught.value)


def test_aliases_that_multiply_are_stopped_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    begun = time.monotonic()
    with pytest.raises(JobFileError, match="more than 20000 values"):
        parse("\n".join(lines), PLACE)
    assert time.monotonic() - begun < 5


def test_aliases_cannot_nest_deeper_than_brackets() -> None:
    lines = ["a0: &a0 " + "[" * 30 + "]" * 30]
    lines += [f"a{n}: &a{n} " + "[" * 30 + f"*a{n - 1}" + "]" * 30 for n in range(1, 25)]
    with pytest.raises(JobFileError, match="nested too deep"):
        parse("\n".join(lines), PLACE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"- a\n- b\n", "a list, not a mapping"),
        (b"hello\n", "a single value, not a mapping"),
        (b"a: 1\nb: \xff\n", "not UTF-8 text"),
        (b"x" * (10 << 20), "10.0 MiB is too large for a job file"),
        (b"#" * (MAX_BYTES + 1), "too large"),
    ],
)
def test_files_that_hold_no_job(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(data)
    with pytest.raises(JobFileError, match=message) as caught:
        read_document(file)
    assert f"{file}:" in str(caught.value)
    assert caught.value.exit_status == 2


def test_a_folder_and_a_missing_file_are_no_job_files(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path / ("x" * 300), Path("a\0b")):
        with pytest.raises(JobFileError, match="no such file"):
            read_document(path)
    for path, what in ((tmp_path, "is a folder"), (Path("/dev/zero"), "is not a regular file")):
        with pytest.raises(JobFileError, match=what):
            read_document(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xef\xbb\xbfname: x\r\n")
    assert plain(read_document(file)) == {"name": "x"}


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    [
        *SCALARS,
        "<<",
        "a: b",
        "# c",
        "- x",
        ".inf",
        "1e999",
        "0x",
        "null ",
        " null",
        "a\nb\n",
        "\ufeff",
        "\x85",
        "%",
        "@",
        "`",
        "---",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_is_written_is_read_back(value: object) -> None:
    text = dump({"value": value})
    again = plain(parse(text, PLACE))["value"]
    assert again == value
    assert dump({"value": again}) == text  # so that 1, 1.0 and true are told apart too
