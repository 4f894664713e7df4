"""Splits as files: what is kept, what it is tied to, and every way in which a file can be another one than it says."""

import dataclasses
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from idiolect import Run, compare, run
from idiolect.data import Dataset, Federation, SplitFile, federate, save_split
from idiolect.data.federated import split_hash
from idiolect.data.split_file import KEY, _seal
from idiolect.errors import UsageError

LABELS = np.random.default_rng(0).integers(0, 4, 300)


def data(labels=LABELS, name="d", **more):
    x = torch.randn(len(labels), 3, generator=torch.Generator().manual_seed(0))
    return Dataset(name, x, torch.as_tensor(labels), 4, "mlp", official_test=np.arange(len(labels)) >= 200, **more)


@pytest.fixture
def kept(tmp_path):
    """A file, and the federation that it was made of."""
    federation = federate(data(), "dirichlet:0.3,minimum=5", 6, 1, test=0.2, validation=0.1, test_from="merged")
    save_split(federation, tmp_path / "s.parquet")
    return tmp_path / "s.parquet", federation


def opened(path, dataset=None):
    named = SplitFile.named(path)
    assert named is not None
    return named.open(data() if dataset is None else dataset)


def same(a, b):
    parts = ("train", "validation", "test")
    return all([r.tolist() for r in getattr(a, p)] == [r.tolist() for r in getattr(b, p)] for p in parts)


# what is kept


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(*[st.lists(st.integers(0, 50), max_size=4)] * 3), min_size=1, max_size=6),
    st.text(max_size=9),
    st.dictionaries(st.text(max_size=4), st.integers() | st.floats(allow_nan=False) | st.text(max_size=4), max_size=3),
)
def test_every_division_comes_back_as_it_was(tmp_path, clients, recipe, made_with):
    """Rows that come twice are allowed where the division has them: a split with replacement."""
    path = tmp_path / "any.parquet"
    path.unlink(missing_ok=True)
    parts = [[np.array(sorted(rows), np.int64) for rows in part] for part in zip(*clients, strict=True)]
    federation = Federation(data(), *parts, split_hash(*parts), recipe, made_with)
    save_split(federation, path)
    found = opened(path)
    assert same(found, federation)
    assert (found.split_hash, found.recipe, found.made_with) == (federation.split_hash, recipe, made_with)
    assert (SplitFile.named(path).clients, SplitFile.named(path).split_hash) == (len(clients), federation.split_hash)


def test_any_program_reads_it_a_row_per_client(kept):
    path, federation = kept
    table = pq.read_table(path)
    assert table.column("train").to_pylist() == [rows.tolist() for rows in federation.train]
    assert table.column("test").to_pylist() == [rows.tolist() for rows in federation.test]
    facts = json.loads(table.schema.metadata[KEY])
    assert facts["made_with"] == {
        "split": "dirichlet:0.3,minimum=5", "clients": 6, "seed": 1, "test": 0.2, "validation": 0.1, "test_from": "merged",
    }  # fmt: skip
    assert facts["data"] == {"name": "d", "rows": 300, "targets": facts["data"]["targets"]}
    assert facts["split_hash"] == federation.split_hash


def test_the_same_split_is_the_same_bytes(kept, tmp_path):
    save_split(kept[1], tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == kept[0].read_bytes()


def test_torch_may_write_to_what_was_read(kept):
    assert all(getattr(opened(kept[0]), part).rows.flags.writeable for part in ("train", "validation", "test"))


def test_nothing_is_overwritten_and_nothing_is_left_half_written(kept, tmp_path, monkeypatch):
    before = kept[0].read_bytes()
    with pytest.raises(UsageError, match=r"s\.parquet' is there already and is never overwritten"):
        save_split(kept[1], kept[0])
    with pytest.raises(UsageError, match=r"name ends in \.parquet"):
        save_split(kept[1], tmp_path / "s.pq")
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        save_split(kept[1], tmp_path / "new.parquet")
    assert kept[0].read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s.parquet"]


def test_a_federation_that_is_not_what_it_says_is_not_kept(kept, tmp_path):
    federation = kept[1]
    odd = {
        "not in 0..299": [np.array([300])],
        "do not ascend": [np.array([3, 2])],
    }
    for message, train in odd.items():
        none = [np.array([], np.int64)]
        made = Federation(federation.dataset, train, none, none, split_hash(train, none, none), "odd")
        with pytest.raises(UsageError, match=message):
            save_split(made, tmp_path / "odd.parquet")
    with pytest.raises(UsageError, match="to be that of its rows"):
        save_split(dataclasses.replace(federation, split_hash="0" * 64), tmp_path / "odd.parquet")
    assert not (tmp_path / "odd.parquet").exists()


# what it is tied to


def test_another_data_set_is_refused_and_another_name_is_not(kept):
    path, federation = kept
    assert same(opened(path, data(name="elsewhere")), federation)
    with pytest.raises(UsageError, match=r"divides 'd' with rows 300, found 'd' with rows 299"):
        opened(path, data(LABELS[:299]))
    with pytest.raises(
        UsageError, match=r"divides 'd' with targets \w+, found 'other' with targets \w+; give the data"
    ):
        opened(path, data(LABELS[::-1].copy(), "other"))


def test_a_hash_in_the_text_is_checked(kept):
    path, federation = kept
    for digits in (8, 64):
        assert SplitFile.named(f"{path}#{federation.split_hash[:digits]}") == SplitFile.named(path)
    with pytest.raises(UsageError, match=r"Expected the split 000000000000 in .* the file has changed"):
        SplitFile.named(f"{path}#{'0' * 64}")
    assert SplitFile.named("dirichlet:0.1") is None
    assert SplitFile.named(f"{path}#xyz") is None


# what is no such file


def rewritten(path, table, facts=None, sealed=True):
    """The table in place of the file's, with its facts changed."""
    own = json.loads(pq.read_schema(path).metadata[KEY])
    own.pop("sha256")
    own |= facts or {}
    text = json.dumps({**own, "sha256": _seal(own) if sealed else "0"})
    pq.write_table(table.replace_schema_metadata({KEY: text}), path)


def lists(*clients):
    return pa.array(clients, pa.large_list(pa.int64()))


def of(train, validation=None, test=None):
    none = lists(*[[]] * len(train))
    return pa.table({"train": train, "validation": validation or none, "test": test or none})


def hashed(*clients):
    return split_hash(*([np.array(rows, np.int64) for rows in part] for part in zip(*clients, strict=True)))


FORGED = {  # the table, facts, and the sentence
    "rows moved": (of(lists([0, 1], [2])), {}, "its rows are not those that its hash stands for"),
    "fewer clients": (of(lists([0])), {"clients": 2, "split_hash": hashed(([0], [], []))}, "its rows are not those"),
    "a row that is not there": (of(lists([300])), {"clients": 1, "split_hash": hashed(([300], [], []))}, r"not in 0\.\.299"),
    "a negative row": (of(lists([-1])), {"clients": 1, "split_hash": hashed(([-1], [], []))}, r"not in 0\.\.299"),
    "a row at two clients": (of(lists([1], [1])), {"clients": 2, "split_hash": hashed(([1], [], []), ([1], [], []))}, "a row twice"),
    "a row in two parts": (of(lists([1]), test=lists([1])), {"clients": 1, "split_hash": hashed(([1], [], [1]))}, "a row twice"),
    "out of order": (of(lists([2, 1])), {"clients": 1, "split_hash": hashed(([2, 1], [], []))}, "do not ascend"),
    "numbers missing": (of(lists([1, None])), {"clients": 1}, "numbers are missing"),
    "a client missing": (of(lists([1], None)), {"clients": 2}, "numbers are missing"),
    "another format": (of(lists([1])), {"format": 2, "idiolect": "9.9"}, "of format 2, of idiolect 9.9"),
    "other columns": (pa.table({"train": lists([1])}), {}, "with other columns"),
    "other types": (of(lists([1])).cast(pa.schema([(p, pa.large_list(pa.int32())) for p in ("train", "validation", "test")])), {}, "with other columns"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_file_is_refused(kept, case):
    path, _ = kept
    table, facts, sentence = FORGED[case]
    rewritten(path, table, facts)
    with pytest.raises(UsageError, match=sentence):
        opened(path)


def test_a_row_may_come_twice_where_the_file_says_so(kept):
    path, _ = kept
    rewritten(
        path, of(lists([1], [1])), {"clients": 2, "split_hash": hashed(([1], [], []), ([1], [], [])), "repeats": True}
    )
    assert [rows.tolist() for rows in opened(path).train] == [[1], [1]]


def test_facts_that_were_changed_are_refused(kept):
    path, _ = kept
    rewritten(path, pq.read_table(path), {"recipe": "another"}, sealed=False)
    with pytest.raises(UsageError, match="its facts are not those that were written"):
        SplitFile.named(path)


def test_files_of_other_kinds_are_refused(tmp_path):
    (tmp_path / "text.parquet").write_text("client,row\n0,1\n")
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "folder.parquet").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    sentences = {
        "text": "damaged, or no split file",
        "empty": "damaged",
        "folder": "damaged",
        "other": "other columns",
        "no": "found nothing there",
    }
    for name, sentence in sentences.items():
        with pytest.raises(UsageError, match=sentence):
            SplitFile.named(tmp_path / f"{name}.parquet")


def test_no_truncated_file_is_taken(kept, tmp_path):
    path, _ = kept
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        (cut := tmp_path / "cut.parquet").write_bytes(whole[:length])
        with pytest.raises(UsageError):
            opened(cut)


def test_a_flipped_byte_is_refused_or_changes_nothing(kept, tmp_path):
    path, federation = kept
    whole, taken = bytearray(path.read_bytes()), 0
    places = range(0, len(whole), 7)
    for place in places:
        whole[place] ^= 0x55
        (tmp_path / "flipped.parquet").write_bytes(whole)
        whole[place] ^= 0x55
        try:
            found = opened(tmp_path / "flipped.parquet")
        except UsageError:
            continue
        taken += 1
        assert same(found, federation)
        assert (found.recipe, found.made_with) == (federation.recipe, federation.made_with)
    assert taken < len(places) / 2  # statistics and names of the writer are all that is not watched


# in a run


def small(path, **more):
    return Run(method="fedavg", data=data(), split=path, rounds=1, backend="serial", **more)


def test_a_run_takes_number_of_clients_and_shares_from_the_file(kept):
    path, federation = kept
    found = run(small(path))
    assert (found.run.clients, found.run.test, found.run.validation, found.run.test_from) == (6, 0.2, 0.1, "merged")
    assert found.summary["split_hash"] == federation.split_hash
    assert same(found.run.federation, federation)
    assert {r["client"] for r in found.clients} == set(range(6))
    assert run(small(str(path), clients=6, test=0.2)).summary["accuracy"] == found.summary["accuracy"]


@pytest.mark.parametrize(("field", "own"), [({"clients": 7}, "6"), ({"test": 0.3}, "0.2"), ({"test": 0.25}, "0.2"), ({"validation": 0.0}, "0.1"), ({"test_from": "official"}, "merged")])  # fmt: skip
def test_what_contradicts_the_file_is_refused(kept, field, own):
    (name,) = field
    with pytest.raises(UsageError, match=rf"{name} must be the {own} of '.*s\.parquet'; found .* Leave {name} out"):
        small(kept[0], **field)


def test_a_federation_given_has_its_own_numbers_too(kept):
    _, federation = kept
    made = Run(method="fedavg", data=federation.dataset, split=federation)
    assert (made.clients, made.test) == (6, 0.2)
    with pytest.raises(UsageError, match="clients must be the 6 of the federation given; found 20"):
        Run(method="fedavg", data=federation.dataset, split=federation, clients=20)


def test_the_run_file_keeps_the_hash_and_refuses_a_file_that_changed(kept, tmp_path):
    path, federation = kept
    made = small(path)
    text = made.to_toml()
    assert f'split = "{path}#{federation.split_hash}"' in text
    assert Run.from_toml(text, data=made.data) == made
    path.unlink()
    save_split(federate(data(), "iid", 6, 2, test=0.2, validation=0.1), path)
    with pytest.raises(UsageError, match=rf"Expected the split {federation.split_hash[:12]}"):
        Run.from_toml(text, data=made.data)
    with pytest.raises(UsageError, match="has changed since this run was made"):
        _ = made.federation


def test_a_comparison_has_one_split_for_all_seeds_and_says_which(kept, tmp_path):
    path, federation = kept
    fields = {"data": data(), "split": str(path), "rounds": 1, "backend": "serial"}
    found = compare(["local", "fedavg"], seeds=[0, 1], out=tmp_path / "out", **fields)
    assert found.summary["split_hash"] == {"0": federation.split_hash, "1": federation.split_hash}
    assert found.summary["clients"] == 6
    assert f"split s.parquet ({federation.recipe}), hash {federation.split_hash[:12]}." in str(found)
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["split_hash"]["1"] == federation.split_hash
    shutil.move(path, tmp_path / "old.parquet")
    save_split(federate(data(), "iid", 6, 2), path)
    with pytest.raises(UsageError, match="other settings, which is never overwritten"):
        compare(["local", "fedavg"], seeds=[0, 1], out=tmp_path / "out", **fields)


@pytest.mark.parametrize("name", ["format", "recipe", "made_with", "clients", "repeats", "split_hash", "data"])
@pytest.mark.parametrize("value", [None, 2.5, "text", [1], {"rows": 3}])
def test_facts_of_another_kind_are_refused_though_signed(kept, name, value):
    path, federation = kept
    rewritten(path, pq.read_table(path), {name: value})
    try:
        found = opened(path)
    except UsageError:
        return
    assert same(found, federation)  # a recipe of another name


def test_columns_whose_names_are_no_text_are_refused(kept):
    path, _ = kept
    path.write_bytes(path.read_bytes().replace(b"element", b"\xff" * 7))
    with pytest.raises(UsageError, match=r"is damaged, or no split file|other columns"):
        SplitFile.named(path)
