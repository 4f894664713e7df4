"""Tables as CSV and Parquet: what becomes a feature, a label, a client, and which rows are refused."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forms import X, Y, csv_by_client, csv_file, csv_train_test, lines, parquet_folder, put

from idiolect.data import federate, load
from idiolect.errors import UsageError


def table(folder, text, name="t.csv", **options):
    return load(put(folder / name, text), **options)


def written(folder, name="t.parquet", **columns):
    path = put(folder / name, b"")
    pq.write_table(pa.table(columns), path)
    return path


# csv


def test_features_labels_and_clients_arrive_in_order(tmp_path):
    path, _ = csv_file(tmp_path)
    data = load(path, group="who")
    assert (data.name, data.network, data.classes, data.class_names) == ("table", "mlp", 2, ("cat", "dog"))
    assert np.array_equal(data.x.numpy(), X.astype(np.float32))
    assert data.y.tolist() == Y.tolist()
    assert [rows.tolist() for rows in federate(data, "given", 3, 0, test=0.0).train] == [
        list(range(k, k + 8)) for k in (0, 8, 16)
    ]
    assert load(path, features=["w", "u"]).x[5].tolist() == X[5, [2, 0]].astype(np.float32).tolist()


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".CSV", ".tsv", ".tsv.gz"])
def test_plain_or_zipped_with_commas_or_tabs(tmp_path, ending):
    text = lines(range(24)).replace(",", "\t" if "tsv" in ending else ",").encode()
    path = put(tmp_path / f"größe ñ 数据{ending}", gzip.compress(text) if ending.endswith("gz") else text)
    data = load(path, group="who")
    assert data.name == "größe ñ 数据"
    assert data.x.shape == (24, 3)


def test_another_delimiter_a_mark_at_the_start_quotes_and_windows_lines(tmp_path):
    text = '\ufeff"a;1";b;label\r\n1;2;"x;y"\r\n3;4;z\r\n'
    data = table(tmp_path, text, delimiter=";")
    assert data.x.tolist() == [[1, 2], [3, 4]]
    assert data.class_names == ("x;y", "z")
    with pytest.raises(UsageError, match=r"columns divided by ',' in .*found one column.*as delimiter=';'"):
        table(tmp_path, text)
    with pytest.raises(UsageError, match=r"delimiter of one character"):
        table(tmp_path, text, delimiter="::")


@pytest.mark.parametrize("first", ["5.1,setosa,0", "1,pine,0", "-1e3,inf,0"])
def test_a_line_with_a_number_is_no_header(tmp_path, first):
    found = table(tmp_path, f"{first}\n5,oak,1\n", label=1 if "setosa" in first else 2, one_hot=True)
    assert len(found) == 2


def test_a_line_that_names_the_label_is_a_header_whatever_else_is_in_it(tmp_path):
    assert table(tmp_path, "2019,2020,label\n5,6,0\n7,8,1\n").x.tolist() == [[5, 6], [7, 8]]
    assert table(tmp_path, "2019,2020,kind\n5,6,0\n7,8,1\n", label="kind").x.shape == (2, 2)
    assert table(tmp_path, "2019,2020,0\n5,6,1\n", label=2).x.shape == (2, 2)


def test_columns_that_count_from_0_are_a_header_as_pandas_writes_them(tmp_path):
    assert table(tmp_path, "0,1,2\n5,6,0\n7,8,1\n", label="2").x.tolist() == [[5, 6], [7, 8]]
    assert table(tmp_path, "0,1,2\n5,6,0\n7,8,1\n", label=2, header=False).x.shape == (3, 2)
    assert table(tmp_path, "10,11,12\n5,6,0\n7,8,1\n", label="12", header=True).x.shape == (2, 2)


@pytest.mark.parametrize(
    ("labels", "y", "names"),
    [
        (["b", "a", "b"], [1, 0, 1], ("a", "b")),
        ([1, 0, 1], [1, 0, 1], None),
        ([1, 2, 10], [0, 1, 2], ("1", "2", "10")),
        ([-1, 1, -1], [0, 1, 0], ("-1", "1")),
        (["1.0", "0.0", "1.0"], [1, 0, 1], None),
        (["true", "false", "true"], [1, 0, 1], ("false", "true")),
        (["2021-01-01", "2020-01-01", "2021-01-01"], [1, 0, 1], ("2020-01-01", "2021-01-01")),
        (["ü", "z", "é"], [2, 0, 1], ("z", "é", "ü")),
    ],
)
def test_labels_are_numbered_in_their_order(tmp_path, labels, y, names):
    text = "a,label\n" + "".join(f"{k},{label}\n" for k, label in enumerate(labels))
    data = table(tmp_path, text)
    assert (data.y.tolist(), data.class_names, data.classes) == (y, names, len(set(labels)))
    if names is None:
        assert table(tmp_path, text, classes=7).classes == 7


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,label\n1,0\n,1\n", {}, r"every row of .*none in row 2 \(the first is 1\), column 'a', and 1 such rows"),
        ("a,label\n1,0\nNA,1\nnan,1\n", {}, r"row 2 .*column 'a', and 2 such"),
        ("a,label\n1,x\n2,\n", {}, r"row 2 .*column 'label'"),
        ("a,label,who\n1,x,\n2,y,b\n", {"group": "who"}, r"row 1 .*column 'who'"),
        ("a,label\n1,0\n1e60,1\n", {}, r"finite numbers in column 'a' of .*found 1e\+60"),
        ("a,label\n1,0\ninf,1\n", {}, r"finite numbers in column 'a' of .*found inf"),
        ("a,b,label\n1,red,0\n2,blue,1\n", {}, r"numbers in column 'b' of .*found string, as 'red'.*one_hot=\[\"b\"\]"),
        ("a,b,label\n1,2020-01-01,0\n2,2020-01-02,1\n", {}, r"numbers in column 'b' of .*found date"),
        ("a,label\n1,0.5\n2,1\n", {}, r"class labels in column 'label' .*found 0\.5 among them"),
        ("a,label\n1,x\n2,x\n", {}, r"two classes or more in column 'label' .*found 'x' alone"),
        ("a,label\n1,x\n2,y\n", {"classes": 3}, r"Expected 3 classes .*found 2 different words"),
        ("a,label\n1,0\n2,5\n", {"classes": 3}, r"labels in 0\.\.2, found 5"),
        ("a,label\n1,0\n2\n", {}, r"Expected a table in .*Row #3"),
        ("a,b,c\n1,0,0\n", {}, r"column 'label' in .*found a, b, c; name the label by label="),
        ("a,b,c\n1,0,0\n", {"label": "d"}, r"Unknown column of .* 'd'"),
        ("a,b,label\n1,0,0\n", {"group": "labels"}, r"Did you mean label"),
        ("a,a,label\n1,0,0\n", {}, r"different names in .*'a' twice"),
        (",a,label\n0,1,0\n1,2,1\n", {}, r"name for every column of .*none for column 1; drop it if it is an index"),
        ("a,label\n", {}, r"at least one row in"),
        ("", {}, r"Expected a table in"),
        ("label,who\n0,1\n", {"group": "who"}, r"columns of features beside 'label'"),
        ("a,label\n1,0\n2,1\n", {"features": ["a", "label"]}, r"'label' of .* is the label or the group"),
        ("a,label\n1,0\n2,1\n", {"features": ["b"]}, r"Unknown column"),
        ("a,label\n1,0\n2,1\n", {"one_hot": ["label"]}, r"one_hot names 'label', which is not a feature"),
        ("a,label\n1,0\n2,1\n", {"mean": [1, 2]}, r"a mean for each of the 1 features"),
        ("a,label\n1,0\n2,1\n", {"std": [0]}, r"a std above 0 for each"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_taken_are_refused_with_the_place(tmp_path, text, options, message):
    with pytest.raises(UsageError, match=message):
        table(tmp_path, text, **options)


def test_what_is_not_text_or_broken_off_is_refused(tmp_path):
    with pytest.raises(UsageError, match="text in UTF-8"):
        load(put(tmp_path / "latin.csv", "größe,label\n1,0\n".encode("latin-1")))
    whole = gzip.compress(lines(range(24)).encode())
    with pytest.raises(UsageError, match="Expected a table in"):
        load(put(tmp_path / "half.csv.gz", whole[: len(whole) // 2]))
    with pytest.raises(UsageError, match="Expected a table in"):
        load(put(tmp_path / "no.csv.gz", b"plain,label\n1,0\n"))


def test_words_become_columns_of_0_and_1_when_asked(tmp_path):
    text = "a,colour,level,label\n1,red,3,0\n2,blue,1,1\n3,red,2,0\n"
    both = [[1, 0, 1, 3], [2, 1, 0, 1], [3, 0, 1, 2]]
    assert table(tmp_path, text, one_hot=True).x.tolist() == both
    assert table(tmp_path, text, one_hot=["colour"]).x.tolist() == both
    assert table(tmp_path, text, one_hot=["level"], features=["level"]).x.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    with pytest.raises(UsageError, match="numbers in column 'colour'"):
        table(tmp_path, text, one_hot=["level"])


def test_features_are_standardised_by_the_training_rows(tmp_path):
    path, options = csv_train_test(tmp_path)
    data = load(path, standardise=True, **options)
    train = X[:18]
    assert np.allclose(data.x.numpy(), (X - train.mean(0)) / train.std(0), atol=1e-5)
    assert data.official_test.tolist() == [False] * 18 + [True] * 6
    given = load(path, mean=[1, 2, 3], std=[2, 2, 4], **options)
    assert np.allclose(given.x.numpy(), (X - [1, 2, 3]) / [2, 2, 4], atol=1e-5)
    assert np.array_equal(load(path, **options).x.numpy(), X.astype(np.float32))
    flat = table(tmp_path, "a,b,label\n7,1,0\n7,3,1\n", standardise=True)
    assert flat.x.tolist() == [[0, -1], [0, 1]]


def test_a_folder_is_train_and_test_or_a_file_a_client(tmp_path):
    sites, options = csv_by_client(tmp_path)
    data = load(sites, **options)
    assert data.group.tolist() == ["a"] * 8 + ["b"] * 8 + ["c"] * 8
    assert load(sites, group="who", features=["u"]).group.tolist() == data.group.tolist()
    put(sites / "d.csv", "u,v,w,label,who\n")
    with pytest.raises(UsageError, match=r"at least one row in '.*d\.csv'"):
        load(sites, **options)
    put(sites / "d.csv", "u,v,label\n1,2,cat\n")
    with pytest.raises(UsageError, match=r"Unknown column of '.*d\.csv' 'w'"):
        load(sites, **options)
    put(sites / "d.csv", "u,v,w,label,who\n1,2,3,8,d\n")
    with pytest.raises(UsageError, match="same kinds of columns in all files"):
        load(sites, **options)
    (sites / "d.csv").rename(sites / "train.csv")
    with pytest.raises(UsageError, match=r"found 'a\.csv' beside them"):
        load(sites, **options)
    with pytest.raises(UsageError, match=r"training files beside 'test\.csv'"):
        load(put(tmp_path / "late" / "test.csv", lines([1, 2])).parent)


def test_whole_numbers_in_one_file_and_fractions_in_another_are_one_column(tmp_path):
    put(tmp_path / "t" / "a.csv", "u,label\n1,0\n2,1\n")
    put(tmp_path / "t" / "b.csv", "u,label\n1.5,0\n2.5,1\n")
    assert load(tmp_path / "t").x.flatten().tolist() == [1, 2, 1.5, 2.5]


# parquet


def test_columns_of_every_number_kind(tmp_path):
    path = written(
        tmp_path,
        i=pa.array([1, 2], pa.int8()), f=pa.array([0.5, 1.5], pa.float32()), h=np.array([1, 2], np.float16),
        b=[True, False], d=pa.array([1, 2], pa.int64()).cast(pa.decimal128(30, 2)), u=pa.array([3, 4], pa.uint64()),
        label=pa.array(["n", "m"]).dictionary_encode(), who=pa.array(["x", "y"]).dictionary_encode(),
    )  # fmt: skip
    data = load(path, group="who")
    assert data.x.tolist() == [[1, 0.5, 1, 1, 1, 3], [2, 1.5, 2, 0, 2, 4]]
    assert (data.y.tolist(), data.class_names, data.group.tolist()) == ([1, 0], ("m", "n"), ["x", "y"])


def test_a_folder_of_parts_is_one_table(tmp_path):
    for k in range(3):
        written(tmp_path, f"data/part-{k}.parquet", a=[2.0 * k, 2.0 * k + 1], label=[0, 1])
    data = load(tmp_path)
    assert data.x.flatten().tolist() == list(range(6))
    assert (data.group, data.official_test) == (None, None)


def test_tables_named_as_on_the_hub_are_tables_and_images_are_not(tmp_path):
    path, _ = parquet_folder(tmp_path)
    assert load(path).official_test.sum() == 6
    texts = tmp_path / "texts"
    written(texts, "train-0.parquet", text=["a", "b"], label=[0, 1])
    from idiolect.data.readers import parquet

    assert parquet.reads(path)
    assert not parquet.reads(texts)
    put(texts / "train-0.parquet", b"PAR1 no")
    assert not parquet.reads(texts)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1.0, None], "label": [0, 1]}, r"row 2 .*column 'a'"),
        ({"a": [1.0, float("nan")], "label": [0, 1]}, r"row 2 .*column 'a'"),
        ({"a": [[1.0], [2.0]], "label": [0, 1]}, r"numbers in column 'a' of .*found list"),
        (
            {"a": [{"bytes": b"x"}, {"bytes": b"y"}], "label": [0, 1]},
            "as images have; for images name the files train-",
        ),
        ({"a": [b"x", b"y"], "label": [0, 1]}, "numbers in column 'a' of .*found binary"),
        ({"a": pa.array([], pa.float64()), "label": pa.array([], pa.int64())}, "at least one row"),
        ({"a": [1, 2], "label": [b"\xff", b"\xfe"]}, "words or numbers in column 'label'"),
        ({"a": [1, 2], "label": [[1], [2]]}, "words or numbers in column 'label'"),
    ],
)
def test_parquet_that_cannot_be_taken_is_refused(tmp_path, columns, message):
    with pytest.raises(UsageError, match=message):
        load(written(tmp_path, **columns))


def test_what_is_not_parquet_is_refused(tmp_path):
    with pytest.raises(UsageError, match="Expected a Parquet file, found something else"):
        load(put(tmp_path / "a.parquet", b"PAR1 hello PAR1"))


def test_folders_named_like_columns_add_none(tmp_path):
    """Arrow would read `year=2020/` as a column."""
    path = written(tmp_path, "year=2020/t.parquet", a=[1, 2], label=[0, 1])
    assert load(path).x.shape == (2, 1)


def test_texts_of_a_parquet_file_that_are_none_are_refused(tmp_path):
    file = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"u": [1.0, 2.0], "label": ["cats", "dogs"]}),
        file,
        use_dictionary=False,
        compression="none",
        write_statistics=False,
    )
    file.write_bytes(file.read_bytes().replace(b"dogs", b"\xb4ogs"))
    with pytest.raises(UsageError, match="Expected a Parquet file, found something else"):
        load(file)
