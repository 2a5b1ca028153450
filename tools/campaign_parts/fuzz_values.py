"""Strategies that several families share: strange values, and texts and files with edits."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")),
    *(
        "",
        " ",
        "none",
        "auto",
        "nan",
        "inf",
        "-",
        "--",
        ".",
        "..",
        "/",
        "/dev/null",
        "\0",
        "\ud800",
        "\ufeff",
        "é",
        "💥",
    ),
    *("a" * 5000, "{prompt}", "{", "}", "%s", "x:y", "os:system", "math", "demo", "*", "~nobody/x", "a=b", "\n", "💥"),
    *([], [[]], [1], ["a"], [None], {}, {"": {}}, {"a": 1}, [0.1, 0.2], [2, 1], [[1, 2], [3]]),
]
strange = st.sampled_from(STRANGE)
words = st.text(max_size=20)
scalars = st.one_of(
    strange,
    st.booleans(),
    st.integers(-10, 300),
    st.integers(),
    st.floats(),
    words,
    st.text(st.characters(), max_size=8),
)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=8
)
deep = st.integers(0, 100_000).flatmap(
    lambda depth: st.sampled_from([b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth, b"(" * depth])
)
pieces = st.one_of(
    st.binary(max_size=12),
    st.text(max_size=12).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b'"', b"'", b"=", b"[", b"]", b"{", b"}", b"#", b"NaN"]
    ),
    st.sampled_from(
        [b"1e999", b"9" * 5000, b"-1", b"null", b"true", b"\\u0000", b"\\ud800", b"[[", b"]]", b"\r", b"\t"]
    ),
)


@st.composite
def edited(draw: st.DrawFn, originals: list[bytes], *, most: int = 4) -> bytes:
    """One of the originals after a few edits: pieces put in, parts removed, doubled, cut off or flipped."""
    data = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(1, most))):
        place = int(draw(st.floats(0, 1)) * len(data))
        length = draw(st.integers(1, 1 + len(data) // 4))
        match draw(st.integers(0, 6)):
            case 0 | 1:
                data = data[:place] + draw(pieces) + data[place:]
            case 2:
                data = data[:place] + data[place + length :]
            case 3:
                data = data[:place] + data[place : place + length] * 2 + data[place + length :]
            case 4:
                data = data[:place]
            case 5 if data:
                place = min(place, len(data) - 1)
                data = data[:place] + bytes([data[place] ^ (1 << draw(st.integers(0, 7)))]) + data[place + 1 :]
            case _:
                data = data[:place] + draw(deep) + data[place:] if draw(st.integers(0, 9)) == 0 else data
    return data
