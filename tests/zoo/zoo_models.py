"""The zoo's models. Each takes inputs of shape (n, 32) and gives scores of shape (n, 3)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

FEATURES = 32
CLASSES = 3
WORDS = 16

MakeModel = Callable[[], nn.Module]


def device() -> str:
    """Where this process trains: on a GPU with `make test-cuda`, unless it is one of several ranks."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def words(inputs: Tensor, length: int = 6) -> Tensor:
    """Word numbers below `WORDS` out of inputs (n, 32): shape (n, length)."""
    return (inputs[:, :length].float().abs() * 7).long() % WORDS


class Through(nn.Module):
    """Applies a function: a layer without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


def _image(inputs: Tensor) -> Tensor:
    return inputs.view(-1, 2, 4, 4)


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3))


def _matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16, bias=False), nn.Tanh(), nn.Linear(16, CLASSES, bias=False))


def _norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.LayerNorm(16), nn.Linear(16, 3)
    )


def _conv() -> nn.Sequential:
    return nn.Sequential(
        Through(_image), nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3),
        nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


class _Words(nn.Module):
    def __init__(self, tied: bool, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 12, sparse=sparse)
        self.out = nn.Linear(12, WORDS, bias=False)
        if tied:
            self.out.weight = self.embedding.weight
        if sparse:
            del self.out
        self.tied = tied

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.embedding(words(inputs)).mean(1)
        return (self.out(found) if hasattr(self, "out") else found)[:, :CLASSES]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(words(inputs))).mean(1))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.lstm(inputs.view(-1, 4, 8))[0][:, -1])


class _Frozen(nn.Module):
    """A frozen backbone whose BatchNorm goes on counting, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.backbone(inputs))


class _Teacher(nn.Module):
    """A frozen teacher that follows the student in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
        return self.student(inputs) + 0.1 * self.teacher(inputs)


class _TeacherAskedFirst(nn.Module):
    """A teacher in evaluation mode, whose statistics follow the student's, and which a loss asks before the student."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> _TeacherAskedFirst:
        super().train(mode)
        self.teacher.eval()
        return self

    @torch.no_grad()
    def targets(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.teacher(inputs)
        return scores

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.student(inputs)
        if self.training:
            with torch.no_grad():
                for mine, theirs in zip(self.teacher.buffers(), self.student.buffers(), strict=True):
                    mine.copy_(0.5 * mine + 0.5 * theirs)
        return scores


_BUFFERS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


class Buffered(nn.Module):
    """Counts its forward passes in a buffer of each dtype, which the scores depend on."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = _BUFFERS) -> None:
        super().__init__()
        self.layers = mlp()
        for dtype in dtypes:
            self.register_buffer(f"passes_{str(dtype).removeprefix('torch.')}", torch.zeros(3).to(dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        total = inputs.new_zeros(())
        for buffer in self.buffers() if self.training else ():
            wide = buffer.to(torch.complex128).real
            wide = 1 - wide if buffer.dtype == torch.bool else wide + 1
            buffer.copy_(wide.to(torch.float32).to(buffer.dtype))
            total = total + wide.sum().float()
        return self.layers(inputs) * (1 + 0.001 * total)


class _Odd(nn.Module):
    """Parameters of no dimension, of no element, in lists and dicts, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.layers = nn.ParameterList([torch.randn(FEATURES, 8) * 0.1, torch.randn(8, CLASSES)])
        self.named = nn.ParameterDict({"bias": torch.zeros(CLASSES)})
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        first, last = self.layers
        return torch.tanh(inputs @ first * self.scale) @ last + self.named["bias"] + self.nothing.sum()


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(17, dtype=torch.complex64))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(inputs.float()) * self.filter))


class _In(nn.Module):
    """Parameters of another dtype than the inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = mlp().to(dtype)
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs.to(self.dtype)).float()


class _Mixed(nn.Module):
    """Half of it in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16).to(torch.bfloat16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(inputs.to(torch.bfloat16))).float())


class _Parametrized(nn.Module):
    """Weight norm and spectral norm, whose vectors change in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            weight_norm(nn.Linear(FEATURES, 16)), nn.ReLU(), spectral_norm(nn.Linear(16, CLASSES))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Many(nn.Module):
    """Many small parameters."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.gains = nn.ParameterList([torch.ones(4) * (1 + index % 5) for index in range(number)])
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.head(inputs) * torch.stack(list(self.gains)).mean(0))[:, :CLASSES]


class _TwoTowers(nn.Module):
    """The second is added only for some of the inputs, so in some steps it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        scores = self.first(inputs)
        return scores + self.second(inputs) if inputs.float().sum() > 0 else scores


class _Registers(nn.Module):
    """Extra state that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.factor = torch.ones(())

    def get_extra_state(self) -> Tensor:
        return self.factor

    def set_extra_state(self, state: Tensor) -> None:
        self.factor = state

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.factor = self.factor * 1.01
        return self.layers(inputs) * self.factor


class _Transposed(nn.Module):
    """Its weight is a transposed view, as weights converted from other frameworks are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, 16).mul_(0.2).t())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(inputs @ self.weight.t()))


class _Sliced(nn.Module):
    """A parameter of one element, whose stride does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.scale = nn.Parameter(torch.ones(4)[::4])
        self.register_buffer("passes", torch.ones(6, dtype=torch.float64)[::6])

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return self.layers(inputs) * self.scale * (1 + 0.01 * self.passes.float())


class Unfreezes(nn.Module):
    """Its first layer is trained from the third pass of each run on; the count is a buffer."""

    frozen_before, frozen_after = 3, 10**9

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.first.requires_grad_(self.frozen_before == 0)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            # At one pass only: a resume has to bring back what was set then.
            if self.passes == self.frozen_before or self.passes == self.frozen_after:
                self.first.requires_grad_(bool(self.passes == self.frozen_before))
            self.passes += 1
        return self.head(torch.relu(self.first(inputs)))


class Freezes(Unfreezes):
    """Its first layer is trained in the first two passes only."""

    frozen_before, frozen_after = 0, 2


MODELS: dict[str, MakeModel] = {
    "mlp": mlp,
    "matrices": _matrices,
    "norms": _norms,
    "conv": _conv,
    "conv channels_last": lambda: _conv().to(memory_format=torch.channels_last),
    "transposed weight": _Transposed,
    "one element of another stride": _Sliced,
    "tied embeddings": partial(_Words, tied=True, sparse=False),
    "sparse embeddings": partial(_Words, tied=False, sparse=True),
    "attention": _Attention,
    "recurrent": _Recurrent,
    "frozen backbone": _Frozen,
    "frozen teacher": _Teacher,
    "teacher asked first": _TeacherAskedFirst,
    "buffers of every dtype": Buffered,
    "odd parameters": _Odd,
    "complex parameters": _Complex,
    "bf16 parameters": partial(_In, torch.bfloat16),
    "fp16 parameters": partial(_In, torch.float16),
    "fp64 parameters": partial(_In, torch.float64),
    "partly bf16": _Mixed,
    "parametrized": _Parametrized,
    "two towers": _TwoTowers,
    "freezes": Freezes,
    "unfreezes": Unfreezes,
    "extra state": _Registers,
    "300 parameters": partial(Many, 300),
    "10,000 parameters": partial(Many, 10_000),
}
