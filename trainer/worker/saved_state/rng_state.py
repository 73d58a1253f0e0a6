"""A rank's random generators as a row of bytes, with rank and step so that a misplaced row is detected."""

import json
import random
import sys
from typing import Any

import torch

from trainer.worker.data import mix
from trainer.worker.workload import WorkloadError

_RNG_BYTES = 16384
_NONE = torch.zeros(1, dtype=torch.uint8, device="cpu")  # placeholder for a missing generator
_MERSENNE, _MERSENNE_BYTES = "MT19937", 4 * 626 + 8
_STATES = 5
"""Number of parts before the origin: torch, Python's numbers and half a normal pair, the device, NumPy."""


def seed_generators(seed: int) -> None:
    """Seed the generators that `pack_rng` saves: torch's, Python's, and NumPy's if it is installed."""
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy as np  # always, because NumPy would seed its own generator if the training code imported it later
    except ImportError:
        return
    if np.random.get_state(legacy=False)["bit_generator"] == _MERSENNE:
        np.random.seed(seed % (1 << 32))
    else:
        np.random.set_state(type(np.random.get_bit_generator())(seed).state)


def seed_by_data(seed: int, token_rank: int, step: int = 0) -> None:
    """Use the same seed on ranks with the same tokens, and different seeds on other ranks.

    `step` is the step at which a new rank starts, so that it does not repeat the numbers drawn from step 0 on.
    """
    own = (seed * 1_000_003 + token_rank) % (1 << 63)
    seed_generators(mix(own ^ mix(step)) >> 1 if step else own)


def rng_name(rank: int) -> str:
    return f"rng/rank-{rank:05d}"


def pack_rng(device: torch.device) -> torch.Tensor:
    """Pack the generators of torch (host and device), Python and, if loaded, NumPy into one row of fixed length."""
    version, numbers, gauss = random.getstate()
    assert version == 3
    python = torch.tensor([int(number) for number in numbers], dtype=torch.int64, device="cpu")
    extra = torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64, device="cpu")
    parts = [torch.get_rng_state(), python.view(torch.uint8), extra.view(torch.uint8)]
    parts.append(torch.cuda.get_rng_state(device) if device.type == "cuda" else _NONE)
    parts.append(_pack_numpy())
    packed = torch.zeros(_RNG_BYTES, dtype=torch.uint8, device="cpu")
    place = 0
    for part in parts:
        header = torch.tensor([len(part)], dtype=torch.int64, device="cpu").view(torch.uint8)
        packed[place : place + 8 + len(part)] = torch.cat([header, part])
        place += 8 + len(part)
    return packed


def set_origin(packed: torch.Tensor, rank: int, step: int) -> None:
    """Write the rank and step into a row from `pack_rng` that has no origin yet. Its length does not change."""
    parts = _parts(packed)
    assert len(parts) == _STATES
    place = sum(8 + len(part) for part in parts)
    packed[place : place + 24] = torch.tensor([16, rank, step], dtype=torch.int64, device="cpu").view(torch.uint8)


def origin_fault(packed: torch.Tensor, name: str, step: int) -> str:
    """Return why a row that `generators_fault` accepts does not belong to `name` at `step`, or "" if it does."""
    origin = torch.cat(_parts(packed)[_STATES:] or [_NONE])
    if len(origin) != 16:
        return "does not record its rank and step"
    saved_rank, saved_step = origin.view(torch.int64).tolist()
    if (rng_name(saved_rank), saved_step) == (name, step):
        return ""
    return f"is the state of rank {saved_rank} at step {saved_step}, in a checkpoint of step {step}"


def _pack_numpy() -> torch.Tensor:
    """Pack NumPy's global generator: words, position and half a normal pair for MT19937, and JSON for others."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return _NONE
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] == _MERSENNE:
        words = [*state["state"]["key"].tolist(), state["state"]["pos"], state["has_gauss"]]
        numbers = torch.tensor(words, dtype=torch.int64, device="cpu").to(torch.int32)
        gauss = torch.tensor([state["gauss"]], dtype=torch.float64, device="cpu")
        return torch.cat([numbers.view(torch.uint8), gauss.view(torch.uint8)])
    text = json.dumps(state, default=_array_in_json).encode()
    if len(text) >= _MERSENNE_BYTES:
        raise WorkloadError(f"the state of NumPy's {state['bit_generator']} is too large to be saved")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _array_in_json(value: Any) -> Any:
    return {"array": value.tolist(), "dtype": str(value.dtype)} if getattr(value, "ndim", 0) else value.item()


def _array_from_json(value: dict[str, Any]) -> Any:
    import numpy as np

    return np.array(value["array"], dtype=value["dtype"]) if "array" in value else value


def _unpack_numpy(part: torch.Tensor) -> None:
    if len(part) == len(_NONE):
        return
    import numpy as np  # only needed if the run that saved the row had loaded it

    if len(part) == _MERSENNE_BYTES:
        *words, place, has_gauss = (number & 0xFFFFFFFF for number in part[:-8].clone().view(torch.int32).tolist())
        gauss = float(part[-8:].clone().view(torch.float64))
        key = np.array(words, dtype=np.uint32)
        state = {
            "bit_generator": _MERSENNE,
            "state": {"key": key, "pos": place},
            "has_gauss": has_gauss,
            "gauss": gauss,
        }
    else:
        state = json.loads(bytes(part.tolist()), object_hook=_array_from_json)
    kind = state["bit_generator"]
    if np.random.get_state(legacy=False)["bit_generator"] != kind:
        if not hasattr(np.random, kind):
            raise WorkloadError(
                f"the checkpoint has the state of a NumPy {kind}: use set_bit_generator() in build_data()"
            )
        np.random.set_bit_generator(getattr(np.random, kind)())
    np.random.set_state(state)


def unpack_rng(packed: torch.Tensor, device: torch.device) -> None:
    """Restore the generators from a row that `pack_rng` returned."""
    of_torch, numbers, pair, of_device, of_numpy, *_ = _parts(packed)
    torch.set_rng_state(of_torch)
    gauss = float(pair.view(torch.float64))
    random.setstate((3, tuple(numbers.view(torch.int64).tolist()), None if gauss != gauss else gauss))
    if device.type == "cuda" and len(of_device) > len(_NONE):
        torch.cuda.set_rng_state(of_device, device)
    _unpack_numpy(of_numpy)


def generators_fault(packed: torch.Tensor) -> str:
    """Return why a row from `pack_rng` cannot be restored, or "" if it can."""
    try:
        parts = _parts(packed)
        if len(parts) < _STATES:
            return f"holds {len(parts)} of the {_STATES} generator states"
        torch.Generator().set_state(parts[0])
        numbers = tuple(parts[1].view(torch.int64).tolist())
        random.Random().setstate((3, numbers, None))
        parts[2].view(torch.float64).item()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"cannot be loaded into a generator: {error}"
    return ""


def _parts(packed: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a row. Each is an 8-byte length followed by data, and a length of 0 ends the row."""
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise ValueError(f"it is {packed.dtype} of shape {tuple(packed.shape)}, not a row of bytes")
    parts, place = [], 0
    while place + 8 <= len(packed) and (length := int(packed[place : place + 8].clone().view(torch.int64))):
        if not 0 < length <= len(packed) - place - 8:
            raise ValueError(f"it ends before the {length} bytes of a part")
        parts.append(packed[place + 8 : place + 8 + length].clone())
        place += 8 + length
    return parts
