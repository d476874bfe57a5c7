"""Pictures of rows as files: found beside the data, in a row, or in the network, and looked at before they are read."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_lightning.faults import RunError
from verl_lightning.options import Options
from verl_lightning.pictures import data_url, decode_image, encode_image, frames_of, from_data_url, spread

if TYPE_CHECKING:
    from PIL.Image import Image

EXAMPLES = (
    "a path relative to the data file, bytes, their base64 text, a data URL such as `data:image/png;base64,...`, or an"
    " object with one of these as `image`, `path`, `bytes` or `url`"
)

_KEYS = ("bytes", "base64", "image", "video", "path", "url", "image_url", "video_url")
_ENDS = 2**18  # bytes at both ends of a file, by which it is told from others
_LAST_BYTES = {"png": b"IEND", "jpeg": b"\xff\xd9"}  # near a whole file's end
_MAGIC = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"II*\0", b"MM\0*")
_OF_PROCESSORS = frozenset(
    {"min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "fps", "nframes", "min_frames"}
    | {"max_frames", "video_start", "video_end"}
)  # what some data sets say beside an image or a video
_NEAR_END = 1024  # bytes
_TIMEOUT = 30.0  # seconds without a byte from a server
_MAX_DOWNLOAD = 2**28  # bytes


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(Options, key="images"):
    """Sources of images beside files and the rows themselves."""

    allow_urls: bool = False
    """Download images that rows name by an address in the network, before the first step; every process downloads all
    of them into its memory."""

    video_frames: int = 0
    """Most frames of a video, evenly spread, that are read as images in its place; 0 refuses videos."""

    def __post_init__(self) -> None:
        if self.video_frames < 0:
            raise ValueError(f"`images.video_frames` must not be negative, got {self.video_frames}.")


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """An image of a row, as a file has it: compressed, so that all of a data set fit into memory."""

    content: bytes | Path = field(compare=False)
    """The file, or where it is."""

    size: tuple[int, int]
    """Width and height in pixels, as it is shown."""

    kind: str
    """Name of its format, such as ``png``."""

    digest: str
    """Text that tells its content from that of others: of its length and of 256 KiB at both of its ends."""

    name: str = field(compare=False, default="image")
    """Name of the image in error messages."""

    @property
    def source(self) -> str:
        """The image for reward functions and people: its path, or a data URL."""
        return data_url(self.content, self.kind) if isinstance(self.content, bytes) else str(self.content.absolute())

    @property
    def data(self) -> bytes:
        """The file's bytes.

        Raises:
            RunError: If it is gone.
        """
        if isinstance(self.content, bytes):
            return self.content
        try:
            return self.content.read_bytes()
        except OSError as error:
            raise RunError(f"the {self.name} can't be read any more: {error}. Keep it for the whole run.") from error

    def decode(self) -> Image:
        """The image in red, green and blue.

        Raises:
            RunError: If the file is gone or damaged.
        """
        data = self.data
        try:
            return decode_image(data)
        except (OSError, SyntaxError, ValueError) as error:
            raise RunError(f"the {self.name} is damaged: {error}. Correct the file, or leave the row out.") from error


def image_file(source: Any, name: str, beside: str, config: ImagesConfig) -> ImageFile:
    """Finds an image and reads its size.

    Args:
        source: Path, bytes, base64 text, data URL, picture of Pillow, or an object with one of these.
        name: Name of the image in error messages.
        beside: Path of the data file, to whose folder paths are relative.
        config: Places where images may be.

    Raises:
        ValueError: If there is no such image, it is damaged, or it lies in the network and may not be downloaded.
    """
    from PIL import Image, UnidentifiedImageError

    content = _content(source, name, beside, config)
    first, last, digest = _ends(content)
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as opened:
            (width, height), kind, mode = opened.size, str(opened.format).lower(), opened.mode
            may_be_turned = kind != "png" or b"eXIf" in first + last  # a PNG would be decoded to find out
            if may_be_turned and opened.getexif().get(0x0112, 1) in (5, 6, 7, 8):  # by a quarter
                width, height = height, width
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"The {name} can't be read as a picture: {error}. Correct the file, or leave the row out."
        ) from error
    if mode in ("F", "I"):
        raise ValueError(f"The {name} has numbers of 32 bits for colours, which no model reads. Save it with 8 bits.")
    found = ImageFile(content=content, size=(width, height), kind=kind, digest=digest, name=name)
    if kind not in _LAST_BYTES or _LAST_BYTES[kind] not in last[-_NEAR_END:]:
        try:  # what is cut off shows here, and not in the midst of a run
            found.decode()
        except RunError as error:
            raise ValueError(f"T{str(error)[1:]}") from error
    return found


def frame_files(source: Any, name: str, beside: str, config: ImagesConfig) -> list[ImageFile]:
    """Finds frames of a video, evenly spread: of a list of pictures, or of a file that Pillow reads, such as a GIF.

    Args:
        source: List of images, or an animated picture as `image_file` takes one.
        name: Name of the video in error messages.
        beside: Path of the data file, to whose folder paths are relative.
        config: Number of frames, and places where they may be.

    Raises:
        ValueError: If there are none.
    """
    _check_keys(source, name)
    while isinstance(source, dict) and (inner := source.get("video") or source.get("frames")):
        source = inner
    if not isinstance(source, list):
        whole = image_file(source, f"{name} (a list of its frames as pictures, or an animated picture)", beside, config)
        source = [encode_image(frame) for frame in frames_of(whole.data, config.video_frames)]
    if not source:
        raise ValueError(f"The {name} has no frames. Leave the row out.")
    chosen = spread(len(source), config.video_frames)
    return [image_file(source[index], f"frame {index + 1} of {name}", beside, config) for index in chosen]


def looks_like_media(value: Any) -> bool:
    """Tells whether a value of a row is a picture or sound: bytes, a data URL, Hugging Face's objects, or a list."""
    if isinstance(value, list):
        return any(map(looks_like_media, value))
    if isinstance(value, dict):
        keys = value.keys()
        is_feature = keys == {"bytes", "path"} or {"array", "sampling_rate"} <= keys
        return (is_feature and any(each is not None for each in value.values())) or looks_like_media(value.get("bytes"))
    if isinstance(value, bytes):
        return value.startswith(_MAGIC)
    if isinstance(value, str):
        return re.match(r"data:(image|audio|video)/", value) is not None
    return is_picture(value)


def is_picture(value: Any) -> bool:
    """Tells whether a value is a picture of Pillow, which is imported only where some are read."""
    return any(base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in type(value).__mro__)


def _ends(content: bytes | Path) -> tuple[bytes, bytes, str]:
    """Returns the first and last bytes of a file, and the text that tells it from others."""
    if isinstance(content, bytes):
        length, first, last = len(content), content[:_ENDS], content[-_ENDS:]
    else:
        with content.open("rb") as file:
            length, first = os.fstat(file.fileno()).st_size, file.read(_ENDS)
            file.seek(max(0, length - _ENDS))
            last = file.read()
    return first, last, hashlib.blake2b(b"%d" % length + first + last, digest_size=16).hexdigest()


def _check_keys(source: Any, name: str) -> None:
    """Refuses settings beside an image, which nobody would heed."""
    if isinstance(source, dict) and (found := sorted(key for key in _OF_PROCESSORS & source.keys() if source[key])):
        raise ValueError(
            f"`{found[0]}` beside the {name} means nothing: the model's processor says how images are read. Set it in"
            " `preprocessor_config.json` of the model's folder, or take it out."
        )


def _content(source: Any, name: str, beside: str, config: ImagesConfig) -> bytes | Path:
    _check_keys(source, name)
    if isinstance(source, dict):
        key = next((key for key in _KEYS if source.get(key)), None)
        if key in ("bytes", "base64") and isinstance(source[key], str):
            return _decoded(source[key], name)
        if key is not None:
            return _content(source[key], name, beside, config)
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if is_picture(source):
        return encode_image(source)
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if not isinstance(source, str) or not source:
        raise ValueError(f"Expected the {name} to be {EXAMPLES}; got {str(source)[:80]!r}.")
    return _from_text(source, name, beside, config)


def _from_text(source: str, name: str, beside: str, config: ImagesConfig) -> bytes | Path:
    try:
        if (data := from_data_url(source)) is not None:
            return data
    except binascii.Error as error:
        raise ValueError(f"The {name} is a data URL whose base64 text is damaged: {error}.") from error
    scheme = re.match(r"([a-z][a-z0-9+.-]+):(//)?", source, re.IGNORECASE)
    if scheme is not None and scheme[1].lower() in ("http", "https") and config.allow_urls:
        return _downloaded(source, name)
    if scheme is not None and (scheme[2] or scheme[1].lower() == "data") and scheme[1].lower() != "file":
        raise ValueError(
            f"The {name} is the address `{source[:80]}`, and nothing is fetched from the network unless"
            " `data.images.allow_urls: true` is set, and then by http and https alone. Download it, and give"
            f" {EXAMPLES}."
        )
    if _is_base64_picture(source):
        return _decoded(source, name)
    if scheme is not None and scheme[1].lower() == "file":
        source = urllib.parse.unquote(source[5:].removeprefix("//").removeprefix("localhost"))
    path = Path(beside).parent / source
    if not os.path.isfile(path):  # which takes names that no file can have
        raise ValueError(f"The {name} is missing: there is no file `{path}`. Paths are relative to the data file.")
    return path


def _is_base64_picture(text: str) -> bool:
    """Tells whether a text can't be a path, since it is a picture's bytes in base64."""
    if len(text) < 64 or not re.fullmatch(r"[A-Za-z0-9+/\s]+={0,2}\s*", text):
        return False
    begin = re.sub(r"\s", "", text[:32])
    return base64.b64decode(begin[: len(begin) // 4 * 4]).startswith(_MAGIC)


def _decoded(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(re.sub(r"\s", "", text), validate=True)
    except binascii.Error as error:
        raise ValueError(f"The base64 text of the {name} is damaged: {error}.") from error


def _downloaded(url: str, name: str) -> bytes:
    """Downloads an image."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
            data: bytes = answer.read(_MAX_DOWNLOAD + 1)
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise ValueError(f"Can't download the {name} from `{url[:200]}`: {error}. Download it beforehand.") from error
    if len(data) > _MAX_DOWNLOAD:
        raise ValueError(f"The {name} at `{url[:200]}` is larger than {_MAX_DOWNLOAD} bytes. Give a smaller one.")
    return data
