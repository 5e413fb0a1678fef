"""Im2col columns, gather4 and scatter4 against definitions that go element by element."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from common.emulator.hardware.row_copy import ColumnCopy, GatherCopy, WideColumnCopy
from common.emulator.hardware.tensor_map import TensorMap, TensorMapAccessError, TensorMapDescriptor, TensorMapError
from common.emulator.hardware.tile_copy import TileCopy
from tests.common.emulator.hardware.tensor_copies import BASE, SHARED, SIZES, SPANS, reference_swizzle


@dataclass
class Image:
    """A tensor (N, D, H, W, C), perhaps without D or H, and a column of it, as `cuTensorMapEncodeIm2col` has them.

    Lists of pixel dimensions are W first.
    """

    dtype: str
    channels: int
    pixels: list[int]
    images: int
    lower: list[int]
    upper: list[int]
    steps: list[int]
    taken: int
    column: int
    swizzle: int
    fill: int
    start: list[int]
    offsets: list[int]
    shared: int
    strides: list[int] = field(default_factory=list)
    data: np.ndarray = field(default=None, repr=False)

    def __post_init__(self) -> None:
        row = -(-self.channels * SIZES[self.dtype] // 16) * 16 + 16
        for extent in self.pixels:
            self.strides.append(row)
            row = row * extent + 16
        self.strides.append(row)
        self.data = np.random.default_rng(row).integers(0, 256, row * self.images, dtype=np.uint8)

    @property
    def dims(self) -> list[int]:
        return [self.channels, *self.pixels, self.images]

    def descriptor(self) -> TensorMapDescriptor:
        return TensorMap.im2col(
            self.dtype, BASE, self.dims, self.strides, self.lower, self.upper, self.taken, self.column,
            [1, *self.steps, 1], swizzle=self.swizzle, oob_fill=self.fill,
        ).descriptor(BASE)  # fmt: skip

    def place(self) -> list[int]:
        return [*self.start, *self.offsets]

    def walk(self):
        """(pixel coordinates, image) of each pixel of the column: nested loops over the whole tensor's pixel box."""
        boxes = [range(lower, extent + upper) for lower, extent, upper in zip(self.lower, self.pixels, self.upper)]
        place, image = list(self.start[1:-1]), self.start[-1]
        for _ in range(self.column):
            yield [p + o for p, o in zip(place, self.offsets)], image
            for axis, box in enumerate(boxes):
                place[axis] += self.steps[axis]
                if place[axis] in box:
                    break
                place[axis] = box[0]
            else:
                image += 1


def random_image(rng, *, stored: bool = False) -> Image:
    while True:
        dtype = str(rng.choice(list(SIZES)))
        per_chunk, swizzle = max(1, 16 // SIZES[dtype]), int(rng.integers(0, 7))
        axes = int(rng.integers(1, 4))
        pixels = [int(rng.integers(1, 8)) for _ in range(axes)]
        lower = [int(rng.integers(0 if stored else -3, 3)) for _ in pixels]
        upper = [int(rng.integers(-3, 1 if stored else 3)) for _ in pixels]
        if any(extent + u - lo < 1 for extent, u, lo in zip(pixels, upper, lower)):
            continue
        start = [int(rng.integers(lo, extent + u)) for lo, extent, u in zip(lower, pixels, upper)]
        channels, images = int(rng.integers(1, 80)), int(rng.integers(1, 4))
        first = int(rng.integers(0 if stored else -1, channels // per_chunk + 1)) * per_chunk
        return Image(
            dtype, channels, pixels, images, lower, upper,
            steps=[int(rng.integers(1, 4)) if rng.random() < 0.3 else 1 for _ in pixels],
            taken=int(rng.integers(1, (SPANS[swizzle] if swizzle else 64) // 16 + 1)) * per_chunk,
            column=int(rng.integers(1, 60)),
            swizzle=swizzle,
            fill=int(not stored and rng.random() < 0.4 and dtype in ("float16", "bfloat16", "float32", "float64")),
            start=[first, *start, int(rng.integers(0 if stored else -1, images + 1))],
            offsets=[0 if stored else int(rng.integers(0, 4)) for _ in pixels],
            shared=128 * int(rng.integers(0, 9)),
        )  # fmt: skip


def reference_elements(image: Image, *, storing: bool = False):
    """(shared offset, global offset or None) of every element."""
    size = SIZES[image.dtype]
    extent = -(-image.channels * size // 16) * 16 // size if storing else image.channels
    pitch = SPANS[image.swizzle] if image.swizzle else image.taken * size
    for number, (pixel, picture) in enumerate(image.walk()):
        inside = 0 <= picture < image.images and all(0 <= p < e for p, e in zip(pixel, image.pixels))
        address = sum(p * s for p, s in zip([*pixel, picture], image.strides))
        for element in range(image.taken):
            channel = image.start[0] + element
            offset = number * pitch + element * size
            yield offset, address + channel * size if inside and 0 <= channel < extent else None


@pytest.mark.parametrize("seed", range(4))
def test_columns_load_as_nested_loops_do(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(50):
        image = random_image(rng)
        size, fill = SIZES[image.dtype], [0xF7, 0x7F] * 4 if image.fill else [0] * 8
        actual = rng.integers(0, 256, SHARED, dtype=np.uint8)
        expected = actual.copy()
        for offset, address in reference_elements(image):
            for byte in range(size):
                target = reference_swizzle(image.swizzle, image.shared + offset + byte)
                expected[target] = fill[byte] if address is None else image.data[address + byte]
        copy = image.descriptor().plan(ColumnCopy)
        copy.check(image.place())
        copy.load(image.place(), image.data, BASE, actual, image.shared)
        assert np.array_equal(actual, expected), image
        assert copy.transaction_bytes == image.column * image.taken * size


@pytest.mark.parametrize("seed", range(4))
def test_columns_store_as_nested_loops_do(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(50):
        image = random_image(rng, stored=True)
        shared = rng.integers(0, 256, SHARED, dtype=np.uint8)
        actual, expected = image.data.copy(), image.data.copy()
        for offset, address in reference_elements(image, storing=True):
            if address is not None:
                for byte in range(SIZES[image.dtype]):
                    source = reference_swizzle(image.swizzle, image.shared + offset + byte)
                    expected[address + byte] = shared[source]
        image.descriptor().plan(ColumnCopy).store(image.start, actual, BASE, shared, image.shared)
        assert np.array_equal(actual, expected), image


def test_columns_add_to_every_pixel() -> None:
    rng = np.random.default_rng(8)
    image = Image("uint32", 12, [5, 4], 3, [0, 1], [-1, 0], [2, 1], 8, 20, 3, 0, [4, 2, 1, 1], [0, 0], 256)
    shared = rng.integers(0, 1 << 31, SHARED // 4, dtype=np.uint32).view(np.uint8)
    expected = image.data.copy()
    for offset, address in reference_elements(image, storing=True):
        if address is not None:
            source = reference_swizzle(3, 256 + offset)
            expected[address : address + 4].view(np.uint32)[:] += shared[source : source + 4].view(np.uint32)
    image.descriptor().plan(ColumnCopy).reduce(image.start, image.data, BASE, shared, 256, "add")
    assert np.array_equal(image.data, expected)


def nhwc(**changes) -> dict:
    arguments = dict(
        dtype="float16", tensor=BASE, dims=[64, 9, 14, 64], strides=[128, 1152, 16128],
        pixel_box_lower_corner=[-1, -1], pixel_box_upper_corner=[-1, -1], channels_per_pixel=64, pixels_per_column=64,
    )  # fmt: skip
    return {**arguments, **changes}


def flat(**changes) -> dict:
    return nhwc(
        dims=[64, 70000, 3], strides=[128, 8960000],
        **{"pixel_box_lower_corner": [0], "pixel_box_upper_corner": [0], **changes},
    )  # fmt: skip


def volume(**changes) -> dict:
    return nhwc(
        dims=[64, 50, 50, 50, 3], strides=[128, 6400, 320000, 16000000],
        **{"pixel_box_lower_corner": [0, 0, 0], "pixel_box_upper_corner": [0, 0, 0], **changes},
    )  # fmt: skip


def sliced(**changes) -> dict:
    return nhwc(dims=[9, 14, 8, 64], strides=[288, 4032, 32256], interleave="16B", channels_per_pixel=8, **changes)


# Each on either side of a rule, as the driver of an H200 took or refused them.
ACCEPTED = [
    nhwc(),
    *[nhwc(pixels_per_column=count) for count in (1, 257, 1024)],
    *[nhwc(channels_per_pixel=count) for count in (8, 16, 256)],
    nhwc(channels_per_pixel=256, pixels_per_column=456),
    *[nhwc(pixel_box_lower_corner=[-128, -1]), nhwc(pixel_box_upper_corner=[-1, 127])],
    *[volume(pixel_box_lower_corner=[0, 0, -16]), volume(pixel_box_upper_corner=[15, 0, -16])],
    *[flat(pixel_box_lower_corner=[-32768]), flat(pixel_box_upper_corner=[32767])],
    nhwc(pixel_box_lower_corner=[0, 0], pixel_box_upper_corner=[-8, -13]),
    nhwc(pixel_box_lower_corner=[8, 0], pixel_box_upper_corner=[0, 0]),
    *[nhwc(element_strides=[8, 1, 1, 1]), nhwc(element_strides=[1, 2, 1, 8])],
    *[nhwc(swizzle="32B", channels_per_pixel=16), nhwc(swizzle="128B")],
    *[sliced(swizzle=mode) for mode in range(4)],
    nhwc(strides=[0, 0, 0]),
]
REFUSED = [
    (nhwc(pixels_per_column=0), r"pixels_per_column: must be 1 to 1024, got 0"),
    (nhwc(pixels_per_column=1025), r"pixels_per_column: must be 1 to 1024"),
    (nhwc(channels_per_pixel=0), r"channels_per_pixel: must be 1 to 256, got 0"),
    (nhwc(channels_per_pixel=4), r"channels_per_pixel: .* multiple of 16 bytes"),
    (nhwc(channels_per_pixel=12), r"channels_per_pixel: .* multiple of 16 bytes"),
    (nhwc(channels_per_pixel=264), r"channels_per_pixel: must be 1 to 256"),
    (nhwc(channels_per_pixel=72, swizzle="128B"), r"channels_per_pixel: .* at most the 128 bytes"),
    (nhwc(channels_per_pixel=32, swizzle="32B"), r"channels_per_pixel: .* at most the 32 bytes"),
    (nhwc(channels_per_pixel=256, pixels_per_column=457), r"must fit in the 233472 bytes .* got 233984"),
    (nhwc(pixel_box_lower_corner=[-129, -1]), r"pixel_box_lower_corner\[0\]: must be -128 to 127, got -129"),
    (nhwc(pixel_box_upper_corner=[-1, 128]), r"pixel_box_upper_corner\[1\]: must be -128 to 127"),
    (volume(pixel_box_lower_corner=[0, 0, -17]), r"pixel_box_lower_corner\[2\]: must be -16 to 15"),
    (volume(pixel_box_upper_corner=[16, 0, 0]), r"pixel_box_upper_corner\[0\]: must be -16 to 15"),
    (flat(pixel_box_upper_corner=[32768]), r"pixel_box_upper_corner\[0\]: must be -32768 to 32767"),
    (nhwc(pixel_box_lower_corner=[0, 0], pixel_box_upper_corner=[-9, 0]), r"pixel box from 0 to -1 is empty"),
    (nhwc(pixel_box_lower_corner=[9, 0], pixel_box_upper_corner=[0, 0]), r"pixel box from 9 to 8 is empty"),
    (nhwc(pixel_box_lower_corner=[0, 0], pixel_box_upper_corner=[0, -14]), r"pixel_box_upper_corner\[1\]: .* empty"),
    (nhwc(element_strides=[0, 1, 1, 1]), r"element_strides\[0\]: must be 1 to 8"),
    (nhwc(element_strides=[1, 1, 1, 9]), r"element_strides\[3\]: must be 1 to 8"),
    (nhwc(dims=[64, 9], strides=[128], pixel_box_lower_corner=[], pixel_box_upper_corner=[]), r"im2col needs rank 3"),
    (nhwc(pixel_box_lower_corner=[0]), r"pixel_box_lower_corner: needs 2 values"),
    (nhwc(dtype="uint8", oob_fill="nan", channels_per_pixel=64), r"oob_fill: NaN"),
    (nhwc(byte_offset=8), r"multiple of 16"),
    (nhwc(channels_per_pixel="8"), r"channels_per_pixel: needs integers"),
]


@pytest.mark.parametrize("arguments", ACCEPTED, ids=range(len(ACCEPTED)))
def test_im2col_maps_that_the_driver_accepts(arguments: dict) -> None:
    d = TensorMap.im2col(**arguments).descriptor(BASE)
    assert TensorMapDescriptor.from_bytes(d.to_bytes()) == d
    d.plan(ColumnCopy)


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=range(len(REFUSED)))
def test_im2col_maps_that_the_driver_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(TensorMapError, match=message):
        TensorMap.im2col(**arguments)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ([0, -2, 0, 0, 0, 0], r"coordinates\[1\]: must be in the pixel box, -1 to 7, got -2"),
        ([0, 8, 0, 0, 0, 0], r"coordinates\[1\]: .* got 8"),
        ([0, 0, 13, 0, 0, 0], r"coordinates\[2\]: must be in the pixel box, -1 to 12"),
        ([0, 0, 0, 0, 256, 0], r"offsets: must be 0 to 255"),
        ([4, 0, 0, 0, 0, 0], r"coordinates\[0\]: must be a multiple of 8"),
        ([0, 0, 0, 0, 1], r"rank 4 needs 4, and 2 offsets"),
        ([0, 0, 0], r"rank 4 needs 4"),
    ],
)
def test_places_outside_the_rules(place: list[int], message: str) -> None:
    copy = TensorMap.im2col(**nhwc()).descriptor(BASE).plan(ColumnCopy)
    with pytest.raises(TensorMapError, match=message):
        copy.check(place)


@pytest.mark.parametrize("corners", [([-1, 0], [0, 0]), ([0, 0], [0, 1])])
def test_stores_need_the_pixel_box_inside_the_tensor(corners: tuple) -> None:
    lower, upper = corners
    arguments = nhwc(pixel_box_lower_corner=lower, pixel_box_upper_corner=upper, pixels_per_column=1)
    copy = TensorMap.im2col(**arguments).descriptor(BASE).plan(ColumnCopy)
    memory, shared = np.zeros(1 << 20, np.uint8), np.zeros(4096, np.uint8)
    with pytest.raises(TensorMapError, match="needs a box inside the tensor"):
        copy.store([0, 2, 2, 0], memory, BASE, shared, 0)
    copy.load([0, 2, 2, 0], memory, BASE, shared, 0)


def test_a_column_that_leaves_its_allocation_faults() -> None:
    copy = TensorMap.im2col(**nhwc(pixels_per_column=16)).descriptor(BASE).plan(ColumnCopy)
    memory, shared = np.zeros(16128, np.uint8), np.zeros(4096, np.uint8)
    copy.load([0, 0, 0, 0], memory, BASE, shared, 0)
    with pytest.raises(TensorMapAccessError, match="outside the allocation") as caught:
        copy.load([0, 0, 0, 1], memory, BASE, shared, 0)
    assert caught.value.address == BASE + 16128
    with pytest.raises(TensorMapAccessError, match="leave the 4096 bytes of shared memory"):
        copy.load([0, 0, 0, 0], memory, BASE, shared, 3072)


# -- .im2col::w ----------------------------------------------------------------------------------------------------


def wide(mode: str = "w", **changes) -> dict:
    """A tensor (64 images, 7 x 9 pixels, 64 channels)."""
    arguments = dict(
        dtype="uint16", tensor=BASE, dims=[64, 9, 7, 64], strides=[128, 1152, 8064], pixel_box_lower_corner_width=0,
        pixel_box_upper_corner_width=0, channels_per_pixel=64, pixels_per_column=20, mode=mode,
    )  # fmt: skip
    return {**arguments, **changes}


def columns(arguments: dict, place: list[int], halo: int) -> np.ndarray:
    """The rows that a copy of `PICTURES` loads: uint16 (pixels, 64)."""
    copy = TensorMap.im2col_wide(**arguments).descriptor(BASE).plan(WideColumnCopy, halo)
    shared = np.zeros(copy.shared_bytes, np.uint8)
    copy.load(place, PICTURES.reshape(-1).view(np.uint8), BASE, shared, 0)
    rows = shared[[reference_swizzle(3, byte) for byte in range(copy.linear_bytes)]].view(np.uint16).reshape(-1, 64)
    assert copy.transaction_bytes == rows.nbytes
    return rows


PICTURES = (np.arange(64 * 7 * 9 * 64, dtype=np.uint32) % 65521 + 1).astype(np.uint16).reshape(64, 7, 9, 64)


def pixel(w: int, h: int, n: int) -> np.ndarray:
    inside = 0 <= w < 9 and 0 <= h < 7 and 0 <= n < 64
    return PICTURES[n, h, w] if inside else np.zeros(64, np.uint16)


def test_a_wide_column_goes_along_w_and_on_to_the_next_image() -> None:
    """The manual's example: coordinates (N, H, W, C) = (7, 2, 3, 0), a halo of two pixels."""
    found = columns(wide(), [0, 3, 2, 7, 0], 2)
    places = [(7, w) for w in range(3, 9)] + [(n, w) for n in (8, 9) for w in range(9)]
    assert np.array_equal(found, [pixel(w, 2, n) for n, w in places[:22]])


def test_the_128_pixels_have_a_halo_after_every_32() -> None:
    found = columns(wide("w128"), [0, 3, 2, 7, 0], 2)
    places = [(7, w) for w in range(3, 9)] + [(n, w) for n in range(8, 24) for w in range(9)]
    groups = [places[32 * group : 32 * group + 34] for group in range(4)]
    assert np.array_equal(found, [pixel(w, 2, n) for group in groups for n, w in group])


@pytest.mark.parametrize(("offset", "halo"), [(0, 1), (1, 0)])
def test_two_buffers_of_a_strided_convolution(offset: int, halo: int) -> None:
    """The manual's example of `wOffset`: every second pixel, from one left of the image on."""
    arguments = wide(pixel_box_lower_corner_width=-1, element_strides=[1, 2, 1, 1])
    found = columns(arguments, [0, -1, 2, 7, offset], halo)
    places = [(n, w + offset) for n in range(7, 12) for w in (-1, 1, 3, 5, 7)]
    assert np.array_equal(found, [pixel(w, 2, n) for n, w in places[: 20 + halo]])


def test_a_wide_column_may_begin_left_of_its_box() -> None:
    found = columns(wide(pixel_box_lower_corner_width=1, pixel_box_upper_corner_width=-4), [0, -2, 6, 63, 0], 0)
    places = [(63, w) for w in range(-2, 5)] + [(64, 1)] * 13
    assert np.array_equal(found, [pixel(w, 6, n) for n, w in places])
    with pytest.raises(TensorMapError, match="must be in the pixel box"):
        TensorMap.im2col_wide(**wide()).descriptor(BASE).plan(WideColumnCopy, 0).check([0, 9, 0, 0, 0])


def test_h_outside_the_tensor_is_filled() -> None:
    assert not columns(wide(), [0, 0, -1, 0, 0], 0).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(swizzle="NONE"), "of the swizzles B64, B128, B128_ATOM_32B"),
        (dict(swizzle="32B"), "of the swizzles"),
        (dict(mode="w64"), "must be 'w' or 'w128'"),
        (dict(pixels_per_column=1025), "must be 1 to 1024"),
        (dict(pixel_box_lower_corner_width=9), "is empty"),
        (dict(pixel_box_upper_corner_width=32768), "must be -32768 to 32767"),
    ],
)
def test_wide_maps_outside_the_rules(changes: dict, message: str) -> None:
    with pytest.raises(TensorMapError, match=message):
        TensorMap.im2col_wide(**wide(**changes))


@pytest.mark.parametrize(("mode", "halo"), [("w", 512), ("w128", 32), ("w", -1)])
def test_halos_have_limits(mode: str, halo: int) -> None:
    with pytest.raises(TensorMapError, match="wHalo: must be"):
        TensorMap.im2col_wide(**wide(mode)).descriptor(BASE).plan(WideColumnCopy, halo)


# -- gather4 and scatter4 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_four_rows_load_and_store_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(60):
        swizzle, rows, columns_, element = int(rng.integers(0, 7)), int(rng.integers(1, 30)), 100, 2
        box = 8 * int(rng.integers(1, SPANS[swizzle] // 16 + 1 if swizzle else 9))
        data = rng.integers(0, 1 << 16, (rows, 104), dtype=np.uint16)
        d = TensorMap("uint16", BASE, [columns_, rows], [208], [box, 1], swizzle=swizzle).descriptor(BASE)
        copy, pitch = d.plan(GatherCopy), SPANS[swizzle] if swizzle else box * element
        column, numbers = 8 * int(rng.integers(0, 14)), [int(n) for n in rng.integers(0, rows + 2, 4)]
        shared = rng.integers(0, 256, 4096, dtype=np.uint8)
        loaded, stored, kept = shared.copy(), data.copy(), data.copy()
        copy.load([column, *numbers], data.reshape(-1).view(np.uint8), BASE, loaded, 256)
        for place, number in enumerate(numbers):
            for k in range(box):
                spot = reference_swizzle(swizzle, 256 + place * pitch + k * element)
                inside = number < rows and column + k < columns_
                expected = data[number, column + k] if inside else 0
                assert loaded[spot : spot + element].view(np.uint16)[0] == expected
                if number < rows and column + k < 104:  # stores write whole chunks of 16 bytes
                    kept[number, column + k] = shared[spot : spot + element].view(np.uint16)[0]
        copy.store([column, *numbers], stored.reshape(-1).view(np.uint8), BASE, shared, 256)
        assert np.array_equal(stored, kept)
        assert copy.transaction_bytes == 4 * box * element


def test_rows_below_zero_are_filled_and_not_stored_to() -> None:
    d = TensorMap("float32", BASE, [32, 8], [128], [32, 1], oob_fill="nan").descriptor(BASE)
    copy, memory, shared = d.plan(GatherCopy), np.ones(1024, np.uint8), np.zeros(512, np.uint8)
    copy.load([0, 3, -1, 8, 7], memory, BASE, shared, 0)
    assert [int(word) for word in shared.view(np.uint32)[::32]] == [0x01010101, 0x7FF77FF7, 0x7FF77FF7, 0x01010101]
    with pytest.raises(TensorMapError, match="non-negative"):
        copy.store([0, 3, -1, 8, 7], memory, BASE, shared, 0)


@pytest.mark.parametrize(
    "changes",
    [
        dict(box=[32, 2]),
        dict(dims=[32, 8, 2], strides=[128, 1024], box=[32, 1, 1]),
        dict(dims=[32], strides=[], box=[32]),
    ],
)
def test_gathers_need_a_matrix_in_boxes_of_one_row(changes: dict) -> None:
    arguments = {**dict(dtype="float32", tensor=BASE, dims=[32, 8], strides=[128], box=[32, 1]), **changes}
    with pytest.raises(TensorMapError, match="need a matrix in boxes of one row"):
        TensorMap(**arguments).descriptor(BASE).plan(GatherCopy)


def test_each_kind_of_copy_needs_a_map_of_its_mode() -> None:
    tiled = TensorMap("float16", BASE, [64, 32, 4], [128, 4096], [64, 8, 1]).descriptor(BASE)
    pixels = TensorMap.im2col(**nhwc()).descriptor(BASE)
    for d, kind, *details in [
        (tiled, ColumnCopy),
        (tiled, WideColumnCopy, 0),
        (pixels, TileCopy),
        (pixels, GatherCopy),
    ]:
        with pytest.raises(TensorMapError, match="needs a tensor map for"):
            d.plan(kind, *details)
