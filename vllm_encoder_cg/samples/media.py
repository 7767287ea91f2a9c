# SPDX-License-Identifier: Apache-2.0
"""Sample images and videos: photographs that packages ship, and made-up ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

PHOTOGRAPHS = (
    ("grace_hopper", "matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
    ("china", "sklearn", "datasets/images/china.jpg"),
    ("flower", "sklearn", "datasets/images/flower.jpg"),
)
"""(name, package, path inside the package)."""

FRAMES_PER_SECOND = 2.0


def photographs() -> list[tuple[str, Image.Image]]:
    """The photographs that installed packages ship, by name, as RGB images.

    matplotlib has ``grace_hopper`` (512 x 600 pixels, width first), scikit-learn
    ``china`` and ``flower`` (640 x 427). No package is imported.

    Raises:
        FileNotFoundError: none of these packages is installed.
    """
    from PIL import Image

    found = []
    for name, package, inside in PHOTOGRAPHS:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(root) / inside
            if path.is_file():
                with Image.open(path) as image:
                    found.append((name, image.convert("RGB")))
    if not found:
        raise FileNotFoundError(
            "no sample photographs: neither matplotlib nor scikit-learn is "
            "installed; install them with: pip install 'vllm-encoder-cg[demo]'"
        )
    return found


def random_image(width: int, height: int, seed: int) -> Image.Image:
    """An RGB image of smooth colours under fine noise; equal seeds, equal pixels.

    Args:
        width: in pixels, at least 1.
        height: in pixels, at least 1.
        seed: any non-negative integer.
    """
    import numpy as np
    from PIL import Image

    _check_positive(width=width, height=height)
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = random.integers(-24, 25, (height, width, 3), dtype=np.int16)
    pixels = np.clip(np.asarray(smooth, dtype=np.int16) + noise, 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def make_video(
    frames: int, height: int, width: int, seed: int = 0, image: Any = None
) -> tuple[np.ndarray, dict[str, Any]]:
    """A video of a window that slides over an image, with vLLM's metadata.

    Give ``(video, metadata)`` to vLLM as one entry of
    ``multi_modal_data["video"]``.

    Args:
        frames: at least 2; vLLM's video models take no single frame.
        height: of a frame, in pixels.
        width: of a frame, in pixels.
        seed: chooses the path of the window and, without ``image``, the image.
        image: a PIL image to cut the frames from, e.g. a photograph.

    Returns:
        The frames, ``[frames, height, width, 3]`` uint8, and the metadata that
        vLLM's own video loader would give for a clip of two frames a second.

    Raises:
        ValueError: a size is below its minimum.
    """
    import numpy as np
    from PIL import Image

    _check_positive(height=height, width=width)
    if frames < 2:
        raise ValueError(f"frames must be at least 2, got {frames}.")
    canvas_size = (2 * width, 2 * height)
    if image is None:
        image = random_image(*canvas_size, seed)
    canvas = np.asarray(
        image.convert("RGB").resize(canvas_size, Image.Resampling.BICUBIC)
    )
    start, stop = np.random.default_rng(seed).random((2, 2)) * (height, width)
    steps = np.linspace(0.0, 1.0, frames)[:, None]
    corners = np.rint(start + (stop - start) * steps).astype(int)
    video = np.stack([canvas[y : y + height, x : x + width] for y, x in corners])
    metadata = {
        "total_num_frames": frames,
        "fps": FRAMES_PER_SECOND,
        "duration": frames / FRAMES_PER_SECOND,
        "frames_indices": list(range(frames)),
        "do_sample_frames": False,
        "video_backend": "opencv",
    }
    return video, metadata


def _check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1 pixel, got {value}.")
