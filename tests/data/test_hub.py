"""Folders of Parquet files, written here with images of a few pixels."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from idiolect.data import federate, load
from idiolect.errors import UsageError

GREY = np.random.default_rng(0).integers(0, 256, (6, 4, 5), dtype=np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
LABEL = {"names": ["cat", "dog", "owl"], "_type": "ClassLabel"}


def encoded(pixels, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write(file, pixels, labels, features=None, image="image", label="label", images=None, **columns):
    cells = images or [{"bytes": encoded(one), "path": None} for one in pixels]
    table = pa.table(
        {
            image: pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            label: labels,
            **columns,
        }
    )
    about = {image: {"_type": "Image"}, label: LABEL} if features is None else features
    metadata = {b"huggingface": json.dumps({"info": {"features": about}}).encode()} if about else None
    file.parent.mkdir(exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), file)


@pytest.fixture
def grey(tmp_path):
    write(tmp_path / "train-00000-of-00002.parquet", GREY[:2], [0, 1], writer=[7, 7])
    write(tmp_path / "train-00001-of-00002.parquet", GREY[2:4], [2, 0], writer=[8, 9])
    write(tmp_path / "test-00000-of-00001.parquet", GREY[4:], [1, 0], writer=[9, 7])
    return tmp_path


def test_pixels_labels_groups_and_test_rows_arrive_in_order(grey):
    data = load(grey, mean=[0], std=[1], group="writer")
    assert data.name == grey.name
    assert data.classes == 3
    assert data.class_names == ("cat", "dog", "owl")
    assert data.network == "convnet3"
    assert torch.allclose(data.x, torch.tensor(GREY)[:, None] / 255)
    assert data.x.dtype == torch.float32
    assert data.x.is_contiguous()
    assert data.y.tolist() == [0, 1, 2, 0, 1, 0]
    assert data.group is not None
    assert data.group.tolist() == [7, 7, 8, 9, 9, 7]
    assert data.official_test is not None
    assert data.official_test.tolist() == [False] * 4 + [True] * 2
    assert load(str(grey)).group is None


def test_pixels_are_normalised_by_the_training_images_alone(grey):
    data = load(grey)
    train = GREY[:4] / 255
    assert torch.allclose(data.x, torch.tensor((GREY[:, None] / 255 - train.mean()) / train.std()).float(), atol=1e-5)
    given = load(grey, mean=[0.5])  # the other one is measured
    assert torch.allclose(given.x, torch.tensor((GREY[:, None] / 255 - 0.5) / train.std()).float(), atol=1e-5)


def test_colour_is_normalised_per_channel_and_comes_channels_first(tmp_path):
    write(tmp_path / "train-0.parquet", COLOUR, [0, 1, 2, 0, 1, 2], image="img")
    data = load(tmp_path)
    assert data.x.shape == (6, 3, 4, 5)
    assert data.official_test is None
    scaled = COLOUR / 255
    expected = (scaled - scaled.mean((0, 1, 2))) / scaled.std((0, 1, 2))
    assert torch.allclose(data.x, torch.tensor(expected).permute(0, 3, 1, 2).float(), atol=1e-5)


def test_jpeg_palettes_and_transparency_become_colour(tmp_path):
    flat = np.full((4, 5, 3), 90, np.uint8)
    palette, clear = io.BytesIO(), io.BytesIO()
    Image.fromarray(flat).quantize(4).save(palette, "PNG")
    Image.fromarray(flat).convert("RGBA").save(clear, "PNG")
    cells = [{"bytes": image, "path": None} for image in (encoded(flat, "JPEG"), palette.getvalue(), clear.getvalue())]
    write(tmp_path / "train-0.parquet", None, [0, 1, 2], images=cells)
    data = load(tmp_path, mean=[0] * 3, std=[1 / 255] * 3)
    assert data.x.shape == (3, 3, 4, 5)
    assert (data.x - 90).abs().max() <= 1


def test_files_may_lie_in_a_folder_named_data(tmp_path):
    write(tmp_path / "data" / "train-0.parquet", GREY, [0, 1, 2, 0, 1, 2])
    assert len(load(tmp_path)) == 6


def test_large_images_get_the_larger_network(tmp_path):
    write(
        tmp_path / "train-0.parquet",
        np.ones((3, 28, 28), np.uint8) * [[[1]], [[2]], [[3]]],
        [0, 1, 2],
        images=[{"bytes": encoded(np.full((28, 28), n, np.uint8)), "path": None} for n in range(3)],
    )
    assert load(tmp_path).network == "cnn4"
    assert load(tmp_path, network="mlp").network == "mlp"


def test_without_metadata_classes_are_counted_and_must_be_complete(tmp_path):
    write(tmp_path / "train-0.parquet", GREY, [0, 1, 0, 1, 0, 1], features={})
    assert load(tmp_path).classes == 2
    write(tmp_path / "train-0.parquet", GREY, [3, 7, 3, 7, 3, 7], features={})
    with pytest.raises(UsageError, match=r"found \{3, 7\}"):
        load(tmp_path)


def test_text_groups_are_taken_and_missing_ones_refused(tmp_path):
    write(tmp_path / "train-0.parquet", GREY, [0, 1, 2, 0, 1, 2], who=list("aabbcc"), gap=[1, None, 1, 1, 1, 1])
    data = load(tmp_path, group="who")
    assert [rows.tolist() for rows in federate(data, "given", 3, 0, test=0.0).train] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    with pytest.raises(UsageError, match=r"every row of column 'gap'.*found 1 without one"):
        load(tmp_path, group="gap")
    with pytest.raises(UsageError, match=r"Unknown column of .*'whom'. Did you mean who"):
        load(tmp_path, group="whom")


def test_the_label_column_is_found_by_its_kind_or_asked_for(tmp_path):
    both = {"image": {"_type": "Image"}, "fine": LABEL, "coarse": LABEL}
    write(
        tmp_path / "train-0.parquet",
        GREY,
        [0, 1, 2, 0, 1, 2],
        features=both,
        label="fine",
        coarse=[0, 0, 1, 0, 0, 1],
    )
    with pytest.raises(UsageError, match=r"Expected one label column.*found fine, coarse; name it by label="):
        load(tmp_path)
    assert load(tmp_path, label="coarse").y.tolist() == [0, 0, 1, 0, 0, 1]
    with pytest.raises(UsageError, match=r"Unknown column.*Did you mean coarse"):
        load(tmp_path, label="coarser")
    write(tmp_path / "train-0.parquet", GREY, [0, 1, 2, 0, 1, 2], features={"fine": LABEL}, label="fine")
    assert load(tmp_path).y.tolist() == [0, 1, 2, 0, 1, 2]


def test_labels_that_are_no_integers_or_out_of_range_are_refused(tmp_path):
    write(tmp_path / "train-0.parquet", GREY, ["a"] * 6)
    with pytest.raises(UsageError, match=r"integer labels in column 'label'.*found string"):
        load(tmp_path)
    write(tmp_path / "train-0.parquet", GREY, [0, 1, 2, -1, 1, 2])
    with pytest.raises(UsageError, match=r"labels in 0\.\.2, found -1"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({"bytes": b"\x89PNG broken", "path": None}, "row 1 of .* cannot be decoded"),
        ({"bytes": encoded(GREY[0])[:-30], "path": None}, "row 1 of .* cannot be decoded"),
        ({"bytes": None, "path": "1.png"}, "row 1 of .* found no bytes"),
        (None, "row 1 of .* found no bytes"),
        ({"bytes": encoded(GREY[0][:3]), "path": None}, "found 4x5 and, in row 1, 3x5; resize"),
        ({"bytes": encoded(GREY[0].astype(np.uint16)), "path": None}, "8 bits per channel"),
    ],
)
def test_images_that_cannot_be_taken_are_named(tmp_path, cell, message):
    good = {"bytes": encoded(GREY[0]), "path": None}
    write(tmp_path / "train-0.parquet", None, [0, 1, 2], images=[good, cell, good])
    with pytest.raises(UsageError, match=message):
        load(tmp_path)


def test_folders_without_the_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"a folder with nothing in it\. What can be read: .*train-"):
        load(tmp_path)
    (tmp_path / "train-0.parquet").write_bytes(b"hello")
    with pytest.raises(UsageError, match="Expected a Parquet file"):
        load(tmp_path)
    write(tmp_path / "train-0.parquet", GREY[:0], [], images=[])
    with pytest.raises(UsageError):
        load(tmp_path)


def test_train_and_test_must_agree(tmp_path):
    write(tmp_path / "train-0.parquet", GREY, [0, 1, 2, 0, 1, 2])
    write(tmp_path / "test-0.parquet", GREY, [0, 1, 2, 0, 1, 2], image="img")
    with pytest.raises(UsageError, match=r"Unknown column of .*test-0.parquet"):
        load(tmp_path)


def test_statistics_must_fit_the_channels(grey):
    for options in ({"mean": [0, 0, 0]}, {"std": [0]}, {"mean": [0], "std": [-1]}):
        with pytest.raises(UsageError, match="for each of the 1 channels"):
            load(grey, **options)


def test_constant_images_need_a_given_deviation(tmp_path):
    write(tmp_path / "train-0.parquet", np.zeros_like(GREY), [0, 1, 2, 0, 1, 2])
    with pytest.raises(UsageError, match="std > 0"):
        load(tmp_path)
    assert load(tmp_path, std=[1]).x.abs().max() == 0


def test_unknown_options_of_a_folder_are_refused(grey):
    with pytest.raises(UsageError, match=r"Unknown option of data set .* 'groups'. Did you mean group"):
        load(grey, groups="writer")


def test_files_may_lie_in_the_folder_of_a_configuration(tmp_path):
    write(tmp_path / "plain" / "train-0.parquet", GREY, [0, 1, 2, 0, 1, 2])
    assert len(load(tmp_path)) == 6
    write(tmp_path / "other" / "train-0.parquet", GREY[:3], [0, 1, 2])
    with pytest.raises(UsageError, match="found those of other, plain; name one by config="):
        load(tmp_path)
    assert len(load(tmp_path, config="other")) == 3
    with pytest.raises(UsageError, match=r"Expected train-.* in '.*/third'"):
        load(tmp_path, config="third")


def test_what_the_library_saves_to_a_disk_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    whole = datasets.Dataset.from_dict(
        {"image": [Image.fromarray(one) for one in GREY], "label": [0, 1, 2, 0, 1, 2]}, features=features
    )
    parts = datasets.DatasetDict(train=whole.select(range(4)), test=whole.select(range(4, 6)))
    parts.save_to_disk(tmp_path / "saved", num_shards={"train": 2, "test": 1})
    data = load(tmp_path / "saved", mean=[0], std=[1])
    assert torch.allclose(data.x, torch.tensor(GREY)[:, None] / 255)
    assert data.official_test.tolist() == [False] * 4 + [True] * 2
    next((tmp_path / "saved" / "train").glob("*.arrow")).write_bytes(b"hello")
    with pytest.raises(UsageError, match="Expected an Arrow file"):
        load(tmp_path / "saved")


def test_validation_sets_and_unlabelled_test_sets(tmp_path):
    write(tmp_path / "train-0.parquet", GREY[:3], [0, 1, 2])
    write(tmp_path / "validation-0.parquet", GREY[3:], [2, 1, 0])
    data = load(tmp_path)
    assert data.name == f"{tmp_path.name} (test: validation)"
    assert data.y.tolist() == [0, 1, 2, 2, 1, 0]
    write(tmp_path / "test-0.parquet", GREY, [None] * 6)
    assert load(tmp_path).name == data.name
    write(tmp_path / "test-0.parquet", GREY, [-1] * 6)
    assert load(tmp_path).name == data.name
    write(tmp_path / "test-0.parquet", GREY, [0, 0, 1, 1, 2, 2])
    assert load(tmp_path).y.tolist() == [0, 1, 2, 0, 0, 1, 1, 2, 2]
    assert load(tmp_path, train="train+validation", test="test").y.tolist() == [0, 1, 2, 2, 1, 0, 0, 0, 1, 1, 2, 2]
    with pytest.raises(UsageError, match=r"Unknown part of .* 'tset'. Did you mean test"):
        load(tmp_path, test="tset")


def test_images_brought_to_one_size(tmp_path):
    cells = [{"bytes": encoded(np.full(shape, 90, np.uint8)), "path": None} for shape in ((4, 9), (7, 5), (3, 3))]
    write(tmp_path / "train-0.parquet", None, [0, 1, 2], images=cells)
    data = load(tmp_path, size=6, mean=[0], std=[1 / 255])
    assert data.shape == (1, 6, 6)
    assert data.x.unique().tolist() == [90]


def test_images_are_read_one_by_one_from_all_chunks():
    from idiolect.data.readers.hub import Encoded

    cells = [{"bytes": bytes([k]), "path": None} if k != 3 else None for k in range(7)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    chunks = [pa.array(cells[a:b], kind) for a, b in ((0, 2), (2, 2), (2, 6), (6, 7))]
    found = Encoded(pa.chunked_array(chunks))
    assert list(found) == [found[k] for k in range(7)] == [cell and cell["bytes"] for cell in cells]
    assert found[1:5:2] == [b"\1", None]
    assert list(Encoded(pa.chunked_array([], kind))) == []
