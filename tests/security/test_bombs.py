"""Small files that say they are large, or become large, and templates that never end."""

import gzip
import io
import json
import time
import zipfile

import numpy as np
import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from bapo import cli
from bapo.config.errors import DumpError
from bapo.diagnose import dump_files
from bapo.diagnose.dumps import read_dump
from bapo.diagnose.uses import Pushes, joined, pushes_by_use
from bapo.models import templates
from bapo.tasks.data import rows


def npz(path, shape, *, data=b"\0" * 16, compression=zipfile.ZIP_STORED):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("logprobs.npy", header.getvalue() + data)
    return path


@pytest.mark.parametrize("shape", [(10**12,), (2**40, 2**40), (10**9, 10**9, 0, 1), (5,)])
def test_an_array_that_says_it_is_larger_than_its_file_is_refused(tmp_path, capsys, shape):
    path = npz(tmp_path / "a.npz", shape)
    assert cli.run(["diagnose", str(path)]) == 2
    assert "a.npz" in capsys.readouterr().err
    if 0 not in shape:
        with pytest.raises(DumpError, match=r"logprobs.npy says that it holds [\d,]+ bytes of numbers, but has \d+"):
            dump_files.read_columns(path)


def test_a_dump_that_unpacks_without_measure_is_refused_and_a_large_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(dump_files, "UNPACKED", 1 << 16)
    count = 1 << 20
    path = npz(tmp_path / "a.npz", (count // 4,), data=b"\0" * count, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(DumpError, match=r"would unpack to [\d,]+ bytes, more than 100 times its size.*numpy\.savez"):
        dump_files.read_columns(path)
    noise = np.random.default_rng(0).normal(size=count // 4).astype(np.float32)
    np.savez_compressed(tmp_path / "b.npz", logprobs=noise)
    assert np.array_equal(dump_files.read_columns(tmp_path / "b.npz")["logprobs"], noise)


@pytest.mark.parametrize("shape", [(10**9, 0), (0, 10**9)])
def test_rows_without_tokens_are_refused_before_they_are_counted(tmp_path, shape):
    columns = {name: np.zeros(shape, np.float32) for name in ("logprobs", "behavior_logprobs", "advantages", "mask")}
    np.savez(tmp_path / "a.npz", **columns)
    with pytest.raises(DumpError, match=r"logprobs has shape .* which holds no token"):
        read_dump([tmp_path / "a.npz"])


@pytest.mark.parametrize("kind", ["empty lists", "equal numbers"])
def test_parquet_with_many_more_values_than_bytes_is_refused(tmp_path, monkeypatch, kind):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(dump_files, "UNPACKED", 1 << 16)
    count = 1 << 20
    values = pa.array([[]] * count, pa.list_(pa.float32())) if kind == "empty lists" else pa.array(np.zeros(count))
    pq.write_table(pa.table({"logprobs": values}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    with pytest.raises(DumpError, match=r"it would unpack to 1,048,576 values, and a file of its size may hold [\d,]+"):
        dump_files.read_columns(tmp_path / "a.parquet")
    noise = np.random.default_rng(0).normal(size=count // 4)
    pq.write_table(pa.table({"logprobs": pa.array(noise)}), tmp_path / "a.parquet")
    assert np.array_equal(dump_files.read_columns(tmp_path / "a.parquet")["logprobs"], noise)


def test_a_dump_whose_tokens_are_all_updates_of_their_own_is_refused(tmp_path, capsys):
    """Each update is measured, and each would look at all tokens."""
    count = 200_000
    columns = {name: np.full(count, -1.0, np.float32) for name in ("logprobs", "behavior_logprobs", "advantages")}
    np.savez_compressed(tmp_path / "a.npz", **columns, update=np.arange(count))
    assert cli.run(["diagnose", str(tmp_path / "a.npz")]) == 2
    assert "update has 200,000 different values, but a file can hold 10,000 updates" in capsys.readouterr().err
    np.savez_compressed(tmp_path / "a.npz", **columns, uses=np.arange(count))
    assert cli.run(["diagnose", str(tmp_path / "a.npz")]) == 2
    assert "uses has 200,000 different values" in capsys.readouterr().err


def test_a_dump_costs_time_by_its_tokens_and_its_updates_never_by_their_product(tmp_path):
    updates, each = 10_000, 40
    count = updates * each
    columns = {name: np.full(count, -1.0, np.float32) for name in ("logprobs", "behavior_logprobs", "advantages")}
    numbers = np.tile(np.arange(updates), each)
    np.savez_compressed(tmp_path / "a.npz", **columns, sequence_ids=np.arange(count), update=numbers, uses=numbers)
    began = time.process_time()
    (first, *others) = read_dump([tmp_path / "a.npz"]).updates
    assert len(others) == updates - 1
    assert first.sequence_ids.tolist() == list(range(each))
    grpo = {"grpo": np.ones(count)}
    pushes = pushes_by_use(numbers, np.zeros(count), columns["advantages"], {"grpo": grpo["grpo"] > 0}, grpo)
    found = joined([pushes, *([{use: Pushes(1)} for use in range(updates)])])
    assert len(found) == updates
    assert found[3].negative == 1 + each
    assert time.process_time() - began < 20  # the product would take minutes


def test_a_compressed_file_that_unpacks_without_measure_is_refused_and_a_large_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "UNPACKED", 1 << 16)
    line = json.dumps({"prompt": "1 + 1", "answer": "2"}) + "\n"
    for name, text in (
        ("many.jsonl.gz", line * 100_000),
        ("one.jsonl.gz", json.dumps({"prompt": " " * (1 << 22)})),
        ("one.json.gz", json.dumps([{"prompt": " " * (1 << 22)}])),
        ("many.csv.gz", "prompt,answer\n" + "1,1\n" * 1_000_000),
    ):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()))
        with pytest.raises(ValueError, match=rf"{name} unpacks to more than [\d,]+ bytes, 100 times.*gunzip {name}"):
            list(rows.read_rows(path))
        plain = path.with_suffix("")
        plain.write_text(text)
        assert len(list(rows.read_rows(plain))) >= 1
    noise = np.random.default_rng(0).integers(0, 10**9, size=20_000).tolist()
    large = tmp_path / "large.jsonl.gz"
    large.write_bytes(gzip.compress("".join(json.dumps({"prompt": str(n)}) + "\n" for n in noise).encode()))
    assert len(list(rows.read_rows(large))) == 20_000


def test_a_line_without_an_end_is_refused_and_json_may_be_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "LONGEST_LINE", 1 << 16)
    monkeypatch.setattr(rows._lines, "__defaults__", (1 << 16,))
    text = json.dumps({"prompt": "x" * (1 << 17)})
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"a\.jsonl has a line of more than 65,536 bytes"):
        list(rows.read_rows(tmp_path / "a.jsonl"))
    (tmp_path / "a.json").write_text(f"[{text}]")
    assert len(list(rows.read_rows(tmp_path / "a.json"))) == 1


ENDLESS = {
    "a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a number": "{% set x = namespace(n=3) %}{% for i in range(60) %}{% set x.n = x.n ** 3 %}{% endfor %}",
    "a text": "{{ 'a' * 9999999999 }}",
    "a constant": "{{ ((9 ** 9) ** 9) ** (9 ** 8) }}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    templates._WORKER.close()
    yield
    templates._WORKER.close()


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_stopped(short, template):
    began = time.monotonic()
    with pytest.raises(TemplateError, match=r"does not end within|MemoryError"):
        templates.ask(template, {})
    assert time.monotonic() - began < 30
    assert templates.ask("{{ x }}", {"x": "next"}) == "next"


def test_a_template_that_makes_much_of_little_is_refused_before_it_becomes_tokens():
    with pytest.raises(TemplateError, match=r"it makes 4,000,000 characters of a chat of \d+, and may make 131,\d+"):
        templates.ask("{{ x * 1000000 }}", {"x": "four"})
    assert templates.ask("{{ x }}{{ x }}", {"x": "x" * 4_000_000}) == "x" * 8_000_000


CHAT = [
    {"role": "system", "content": "Be <b>bold</b> 'and' \"q\""},
    {"role": "user", "content": "Wie? 世界 \udc80 \n x  "},
]
WRITTEN = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}",
    "{{ bos_token }}{%- for m in messages -%}\n  {{ m | tojson }}\n{% endfor %}\n  {{ messages | tojson(indent=2) }}\n",
    "  {% if tools is none %}none{% endif %}\n  {# c #}\n"
    "{{ documents }}{{ undefined_one }}{{ undefined_one is defined }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{{ loop.last }}{% endfor %}",
    "{% macro say(x) %}[{{ x }}]{% endmacro %}{{ say(messages[0].content) }}"
    "{{ strftime_now('%Y') }}{{ [3, 1] | sort }}",
    "{{ messages[1].content.split('?')[0].upper() }}{{ '%05.1f' | format(3.14159) }}{{ {'b': 1} | tojson }}",
]


@pytest.mark.parametrize("template", WRITTEN)
def test_templates_are_rendered_as_transformers_renders_them(template):
    values = {"add_generation_prompt": True, "bos_token": "<s>"}
    expected = render_jinja_template([CHAT], chat_template=template, **values)[0][0]
    asked = values | {"messages": CHAT, "tools": None, "documents": None}
    assert templates.answer(template, asked, ("", "")) == {"answer": expected}
    assert templates.ask(template, asked) == expected
    assert templates.answer(template, None, ("", "")) == {"answer": templates.ask(template)}


def test_a_template_refuses_as_in_transformers():
    for template in ("{{ raise_exception('no system') }}", "{{ messages.append(1) }}", "{% if %}", "{{ 1 / 0 }}"):
        with pytest.raises((TemplateError, ZeroDivisionError)) as expected:
            render_jinja_template([CHAT], chat_template=template)
        with pytest.raises(TemplateError) as found:
            templates.ask(template, {"messages": CHAT})
        assert str(expected.value) in str(found.value)


def test_damaged_members_of_a_dump_are_refused_with_words_and_unicode_tables_are_not_read(tmp_path):
    path = npz(tmp_path / "a.npz", (4,), compression=zipfile.ZIP_LZMA)
    data = bytearray(path.read_bytes())
    data[60:75] = b"\xff" * 15
    path.write_bytes(data)
    with pytest.raises(DumpError, match=r"a\.npz cannot be read"):
        dump_files.read_columns(path)
    with pytest.raises(DumpError, match=r"a\.npz cannot be read"):
        dump_files.read_columns(npz(tmp_path / "a.npz", (True,)))
    head = io.BytesIO()
    np.lib.format.write_array_header_2_0(head, {"descr": "<f4", "fortran_order": False, "shape": (6 * 2**30,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("logprobs.npy", b"\x93NUMPY\x03" + head.getvalue()[7:])
    assert dump_files.read_columns(path) == {}
