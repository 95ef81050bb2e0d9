# %% [markdown]
# # A camera in the dark
#
# A camera pans and zooms over two photographs in bad light. A small convolutional network, trained here on other parts
# of them, takes the noise out of each frame. Which frame rate does it reach in float, converted to int8, and lowered,
# and does anyone see a difference?
#
# Needs `pip install 'dbrq[examples]'`. As a script: `python examples/notebook_stream.py [--out FOLDER]`; it prints
# the frame rates and the quality (PSNR), and saves two pictures.

# %%
import statistics
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import dbrq
import pictures

options = pictures.options(steps=120, frames=60)
out, STEPS, FRAMES = options.out, options.steps, options.frames
HEIGHT, WIDTH = 240, 320
PHOTOGRAPHS = [torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images]  # (3, 427, 640)
torch.manual_seed(0)


# %% [markdown]
# The network works at half the resolution, on four times the channels, and gives what a blurred frame lacks.


# %%
class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(x)))


class Denoiser(nn.Module):
    """``(N, 3, H, W)`` frames in 0 to 1, of even height and width, in and out."""

    def __init__(self, channels: int = 48, blocks: int = 3) -> None:
        super().__init__()
        self.head = nn.Conv2d(12, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.tail = nn.Conv2d(channels, 12, 3, padding=1)
        nn.init.zeros_(self.tail.weight)
        nn.init.zeros_(self.tail.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(F.relu(self.head(F.pixel_unshuffle(4 * x - 2, 2))))
        blurred = F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        return blurred + F.pixel_shuffle(self.tail(h), 2)


def in_the_dark(clean: Tensor) -> Tensor:
    """What the sensor gives: the more light, the more noise."""
    return (clean + 0.12 * (0.3 + clean.sqrt()) * torch.randn_like(clean)).clamp(0, 1)


def patches(number: int = 16, size: int = 48) -> Tensor:
    """Pieces of the left halves of the photographs."""
    found = []
    for _ in range(number):
        picture = PHOTOGRAPHS[int(torch.randint(2, ()))]
        top, left = (int(torch.randint(length - size, ())) for length in (picture.shape[1], picture.shape[2] // 2))
        found.append(picture[:, top : top + size, left : left + size])
    return torch.stack(found)


model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
for _ in range(STEPS):
    clean = patches()
    F.l1_loss(model(in_the_dark(clean)), clean).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
model.eval()


# %% [markdown]
# The camera: where it looks moves to the right half, and it zooms in. Half of the frames are of either photograph.


# %%
def frame(number: int) -> Tensor:
    """``(1, 3, 240, 320)``, without noise."""
    picture, along = PHOTOGRAPHS[2 * number // FRAMES], 2 * number / FRAMES % 1
    height, width = round(HEIGHT * (1.2 - 0.5 * along)), round(WIDTH * (0.9 - 0.4 * along))
    top, left = round((picture.shape[1] - height) * along), round(320 + (320 - width) * along)
    view = picture[None, :, top : top + height, left : left + width]
    return F.interpolate(view, size=(HEIGHT, WIDTH), mode="bilinear", antialias=True)


stream = [in_the_dark(frame(number)) for number in range(FRAMES)]

# %% [markdown]
# Quantize on a few noisy frames of the left halves, which the stream does not show, and lower.

# %%
views = [in_the_dark(picture[None, :, 60 : 60 + HEIGHT, :WIDTH]) for picture in PHOTOGRAPHS]
quantized = dbrq.quantize(model, views)
print(f"{dbrq.report(quantized).coverage:.1%} of all multiply-accumulates in int8")
models = {
    "float": model,
    "int8, converted": quantized,
    "int8, torchscript": dbrq.lower(quantized, views[0]),
    "int8, onednn": dbrq.lower(quantized, views[0], backend="onednn"),
}

# %% [markdown]
# Each frame goes through all of them, in turns: whatever else the machine does meets all alike.

# %%
latencies: dict[str, list[float]] = {name: [] for name in models}
cleaned: dict[str, list[Tensor]] = {name: [] for name in models}
with torch.no_grad():
    for noisy in [*stream[:3], *stream]:  # the first three are for warming up
        for name, one in models.items():
            start = time.perf_counter()
            cleaned[name].append(one(noisy))
            latencies[name].append(1e3 * (time.perf_counter() - start))
latencies = {name: taken[3:] for name, taken in latencies.items()}
cleaned = {name: frames[3:] for name, frames in cleaned.items()}


def psnr(frames: list[Tensor]) -> float:
    """Over the whole stream, in dB: the larger, the nearer to the frames without noise."""
    errors = [F.mse_loss(found.clamp(0, 1), frame(number)).item() for number, found in enumerate(frames)]
    return -10 * torch.tensor(errors).mean().log10().item()


quality = {"the camera's": psnr(stream)} | {name: psnr(frames) for name, frames in cleaned.items()}
rates = {name: 1e3 / statistics.median(taken) for name, taken in latencies.items()}
for name, decibels in quality.items():
    print(f"{name:18} PSNR {decibels:5.2f} dB" + (f", {rates[name]:5.1f} frames per second" if name in rates else ""))

# %%
rows = [FRAMES // 4, 3 * FRAMES // 4]  # one frame of either photograph
figure, grid = plt.subplots(2, 4, figsize=(13, 5))
for axes, number in zip(grid, rows, strict=True):
    columns = (("camera", stream), ("float", cleaned["float"]), ("int8", cleaned["int8, onednn"]))
    for ax, (name, frames) in zip(axes, columns, strict=False):
        error = F.mse_loss(frames[number].clamp(0, 1), frame(number))
        ax.set_title(f"{name}: PSNR {-10 * error.log10():.1f} dB")
        ax.imshow(frames[number][0].clamp(0, 1).permute(1, 2, 0).numpy())
    apart = 255 * (cleaned["int8, onednn"][number] - cleaned["float"][number])[0].abs().mean(0)
    image = axes[3].imshow(apart.numpy(), cmap="magma", vmin=0, vmax=2)
    axes[3].set_title(f"int8 - float: {apart.mean():.2f} of 255")
    figure.colorbar(image, ax=axes[3], label="levels of 255")
for ax in grid.flat:
    ax.axis("off")
pictures.save(figure, out / "frames.png")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(2, 1))
for name, colour in pictures.colours(latencies).items():
    left.plot(latencies[name], color=colour, label=name)
left.set(xlabel="frame", ylabel="latency (ms)", ylim=(0, None), title="Latency of each frame, 320 x 240 pixels")
pictures.bars(right, rates, "frames per second (1 / median latency)", "%.0f")
right.set_title("Frame rate")
figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4)
pictures.save(figure, out / "latency.png")
