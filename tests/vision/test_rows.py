"""Pictures of rows: wherever they come from and whatever they look like they are read, or refused by name."""

from __future__ import annotations

import base64
import io
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from tests.vision.tiny_vision import squares, write_processor
from verl_lightning.data.chat import tokenize_chats
from verl_lightning.data.files import Row, fingerprint
from verl_lightning.data.image_files import ImagesConfig, image_file
from verl_lightning.data.own_rows import digest
from verl_lightning.data.prompts import tokenize_prompts
from verl_lightning.data.rows import chat_row, prompt_row, read_prompt_rows
from verl_lightning.faults import RunError
from verl_lightning.models.processor import ImageProcessor
from verl_lightning.models.tokenizer import load_tokenizer
from verl_lightning.pictures import data_url, decode_image, encode_image

PNG = encode_image(squares(2))
BASE64 = base64.b64encode(PNG).decode()


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """Tokenizer and processor of a Qwen2.5-VL."""
    folder = tmp_path_factory.mktemp("processor")
    write_processor(folder, "qwen2_5_vl")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    tokenizer = load_tokenizer(folder)
    return tokenizer, ImageProcessor(str(folder), "qwen2_5_vl", tokenizer.convert_tokens_to_ids("<|image_pad|>"))


def tokenized(reader, row, beside="rows.jsonl", config=ImagesConfig()):
    row = prompt_row(Row(values=row | {"ground_truth": "1"}, name="row 1", file=str(beside)), needs_truth=True)
    return tokenize_prompts([row], reader[0], None, reader[1], config)[0]


def saved(picture, kind, **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "given",
    [PNG, BASE64, f"{BASE64[:76]}\n{BASE64[76:]}", data_url(PNG, "png"), squares(2), {"bytes": PNG, "path": None},
     {"bytes": BASE64}, {"base64": BASE64}, {"bytes": None, "path": "a b.png"}, "a b.png", "file://a%20b.png",
     {"url": {"url": data_url(PNG, "png"), "detail": "auto"}}],
)  # fmt: skip
def test_a_picture_is_the_same_wherever_it_is(tmp_path, reader, given):
    (tmp_path / "a b.png").write_bytes(PNG)
    prompt = tokenized(reader, {"prompt": "<image>a", "images": [given]}, tmp_path / "rows.jsonl")
    expected = tokenized(reader, {"prompt": "<image>a", "images": [PNG]})

    assert prompt.ids == expected.ids
    assert prompt.shown == expected.shown
    assert prompt.shown.files[0].decode().tobytes() == squares(2).tobytes()


def test_rows_as_those_of_geometry3k_are_read(tmp_path, reader):
    """Parquet as `datasets` writes it, with verl's columns, of which rows have one or two pictures, or none."""
    rows = [
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": "<image>" * count + "Find x."}],
            "images": [{"bytes": PNG, "path": None}] * count,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "3"},
            "extra_info": {"split": "train", "index": count, "answer": "3", "question": "Find x."},
        }
        for count in (1, 2, 0)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    found = tokenize_prompts(
        read_prompt_rows(str(tmp_path / "train.parquet"), None), reader[0], None, reader[1], ImagesConfig()
    )

    assert [prompt.ids.count(reader[1].image_token_id) for prompt in found] == [4, 8, 0]
    assert found[1].row.values["prompt"][0]["content"] == "<image><image>Find x."


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_pictures_of_all_modes_show_their_colours(mode):
    grey = Image.new("L", (4, 4), 128)
    if mode == "I;16":
        picture = Image.new("I", (4, 4), 128 * 257).convert("I;16")
    else:
        picture = grey.convert("RGB").convert(mode, dither=Image.Dither.NONE) if mode == "1" else grey.convert(mode)
    (low, *_), *_ = decode_image(saved(picture, "jpeg" if mode in ("CMYK", "YCbCr") else "png")).getcolors()[0][1:]

    assert low == pytest.approx(255 if mode == "1" else 128, abs=1)


def test_a_picture_turned_by_its_camera_has_the_tokens_of_its_upright_size(reader):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = saved(Image.new("RGB", (32, 8)), "jpeg", exif=exif)
    prompt = tokenized(reader, {"prompt": "<image>", "images": [turned]})

    assert prompt.shown.files[0].size == prompt.shown.files[0].decode().size == (8, 32)
    assert prompt.shown.read(prompt.ids, reader[1]).inputs.image_grid_thw.tolist() == [[1, 8, 2]]


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (1500, 1000)])
def test_tiny_and_large_pictures_have_the_tokens_that_their_model_reads(reader, size):
    prompt = tokenized(reader, {"prompt": "<image>", "images": [encode_image(Image.new("RGB", size))]})
    grid = prompt.shown.read(prompt.ids, reader[1]).inputs.image_grid_thw[0]

    assert prompt.ids.count(reader[1].image_token_id) == grid.prod() // 4


def shows(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "a"}]}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image>", "images": [encode_image(Image.new("RGB", (1, 300)))]},
         r"processor refuses the image 1 of 1 in row 1, of 1 by 300 pixels: .*aspect ratio"),
        ({"prompt": "<image>", "images": [PNG[:-40]]}, r"The image 1 of 1 in row 1 is damaged: "),
        ({"prompt": "<image>", "images": [saved(squares(1), "jpeg")[:-90]]}, "image 1 of 1 in row 1 can't be read"),
        ({"prompt": "<image>", "images": [saved(Image.new("F", (4, 4)), "tiff")]}, "numbers of 32 bits for colours"),
        ({"prompt": "<image>", "images": [{"bytes": "a"}]}, "base64 text of the image 1 of 1 in row 1 is damaged"),
        ({"prompt": "<image>", "images": ["ftp://a/b.png"]}, "the address `ftp://a/b.png`, and nothing is fetched"),
        ({"prompt": "<image>", "images": ["a" * 300]}, "is missing: there is no file"),
        ({"prompt": shows({"type": "input_audio", "input_audio": {"data": ""}})}, "of the type `input_audio` in"),
        ({"prompt": shows({"type": "audio", "audio": "a.wav"})}, "content of the type `audio` in message 1"),
        ({"prompt": shows({"type": "video", "video": "a.mp4"})}, "content of the type `video` in message 1"),
        ({"prompt": [{"role": "assistant", "content": [{"type": "image", "image": PNG}]}]}, "a turn of the assistant"),
        ({"prompt": shows({"type": "image", "image": PNG, "max_pixels": 99})}, "`max_pixels` beside the image 1"),
        ({"prompt": "<image>", "images": [{"image": PNG, "resized_width": 9}]}, "`resized_width` beside the image"),
        ({"prompt": shows({"type": "image", "index": 1}), "images": [PNG]}, "the image of the index 1, where that of"),
        ({"prompt": "a", "audios": ["a.wav"]}, "The column `audios` in row 1 is not empty"),
        ({"prompt": "a", "videos": ["a.mp4"]}, r"column `videos` in row 1 .* \(`data.images.video_frames`\)"),
        ({"prompt": "a", "decoded_image": {"bytes": PNG, "path": None}}, "The column `decoded_image` in row 1 seems"),
        ({"prompt": "a", "image_path": "a.png"}, r"set `data.columns: {images: image_path}`"),
        ({"prompt": "<image>", "images": [PNG], "second": squares(1)}, "The column `second` in row 1 seems to hold"),
    ],
)  # fmt: skip
def test_what_would_get_lost_is_refused(reader, row, message):
    with pytest.raises(ValueError, match=message):
        tokenized(reader, row)


def test_pictures_that_a_text_model_does_not_read_are_refused(reader):
    assert tokenized((reader[0], None), {"prompt": "a", "picture": {"bytes": None, "path": None}, "image_path": ""}).ids
    for row, message in (
        ({"prompt": "a", "images": [PNG]}, "The column `images` in row 1 is not empty, but only text can be learnt"),
        ({"prompt": "a", "mm_token_type_ids": [0]}, "The column `mm_token_type_ids` in row 1 is not empty, but only"),
        ({"prompt": "a", "picture": [PNG]}, "The column `picture` in row 1 seems to hold pictures"),
        ({"prompt": shows({"type": "image", "image": PNG})}, "content of the type `image` in message 1"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenized((reader[0], None), row)


def test_frames_of_videos_are_read_as_images_where_they_may(tmp_path, reader):
    frames = [squares(count) for count in (1, 2, 3, 4)]
    animated = saved(frames[0], "gif", save_all=True, append_images=frames[1:])
    pictures = [encode_image(frame) for frame in frames]
    rows = (
        {"prompt": "<video>a<image>", "videos": [pictures], "images": [PNG]},
        {"prompt": "<video>a<image>", "videos": [animated], "images": [PNG]},
        {"prompt": [{"role": "user", "content": [{"type": "video", "video": pictures}, "a", {"image": PNG}]}]},
    )
    expected = tokenized(reader, {"prompt": "<image><image>a<image>", "images": [pictures[0], pictures[3], PNG]})
    for row in rows:
        prompt = tokenized(reader, row, config=ImagesConfig(video_frames=2))
        assert prompt.ids == expected.ids
        assert [file.decode().tobytes() for file in prompt.shown.files] == [
            file.decode().tobytes() for file in expected.shown.files
        ]


@pytest.fixture
def address():
    """A server of one picture."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(PNG)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/a.png"
    server.shutdown()
    server.server_close()


def test_addresses_are_fetched_where_they_may_be(reader, address):
    row = {"prompt": "<image>", "images": [address]}
    with pytest.raises(ValueError, match="nothing is fetched from the network unless `data.images.allow_urls: true`"):
        tokenized(reader, row)

    allowed = ImagesConfig(allow_urls=True)
    assert tokenized(reader, row, config=allowed).shown.files[0].data == PNG
    with pytest.raises(ValueError, match="Can't download the image 1 of 1 in row 1 from .*404"):
        tokenized(reader, {"prompt": "<image>", "images": [address + "x"]}, config=allowed)
    with pytest.raises(ValueError, match="is missing: there is no file"):
        tokenized(reader, {"prompt": "<image>", "images": ["file:///etc/no.png"]}, config=allowed)


def test_rows_whose_pictures_changed_are_other_rows(tmp_path):
    file, rows = tmp_path / "a.png", [Row(values={"images": ["a.png"]}, name="row 1")]

    def found(picture):
        picture.save(file)
        return image_file("a.png", "image", str(tmp_path / "rows.jsonl"), ImagesConfig()).digest

    one, other, again = found(squares(1)), found(squares(2)), found(squares(1))
    assert one == again != other
    assert fingerprint(rows, [one]) != fingerprint(rows, [other])
    assert fingerprint(rows, []) == fingerprint(rows)


def test_pictures_in_rows_of_a_loader_are_told_by_their_content():
    assert digest({"image": squares(1)}) == digest({"image": squares(1)}) != digest({"image": squares(2)})


def test_a_picture_that_goes_away_is_told_by_its_row(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    found = image_file("a.png", "image 1 of 1 in row 3", str(tmp_path / "rows.jsonl"), ImagesConfig())
    (tmp_path / "a.png").unlink()

    with pytest.raises(RunError, match="the image 1 of 1 in row 3 can't be read any more"):
        found.decode()
    with pytest.raises(RunError, match="the image 1 of 1 in row 3 is damaged"):
        replace(found, content=PNG[:-60]).decode()


def test_images_in_several_turns_keep_their_order(reader):
    said = [
        {"role": "system", "content": [{"type": "image"}, {"type": "text", "text": "s"}]},
        {"role": "user", "content": "a<image>b<image>c"},
        {"role": "assistant", "content": "1 <image>"},
        {"role": "user", "content": [{"type": "image", "image": PNG}, {"type": "image", "index": 3, "text": None}]},
        {"role": "assistant", "content": "2"},
    ]
    pictures = [encode_image(squares(count)) for count in (1, 3, 4, 5)]
    row = chat_row(Row(values={"messages": said, "images": pictures}, name="row 1"))
    (chat,) = tokenize_chats([row], reader[0], supervise="all", enable_thinking=None, processor=reader[1])

    assert [image.data for image in chat.images] == [*pictures[:3], PNG, pictures[3]]
    assert chat.ids.count(reader[1].image_token_id) == 5 * 4
    supervised = [token for token, keep in zip(chat.ids, chat.is_supervised, strict=True) if keep]
    assert reader[0].decode(supervised) == "1 <image><|end|>2<|end|>"
