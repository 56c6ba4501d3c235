"""What a layer was when it was compared. While it is so, the comparison holds."""

from __future__ import annotations

import copy
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ._snapshot import CODE, OWN, PLAIN, VERDICTS, has_numbers, list_class_attributes

_MOST_PARTS = 64  # of a container
_LOOKED_AT, _MOST_NUMBERS = 16_384, 1_000_000  # elements of a tensor


class State:
    """What a layer holds beside the parameters of the linear layers that its form calls: attributes, other layers, buffers,
    other parameters, attributes of its class. Parameters that a form calls may change, but for matrices of zeros, as a fresh
    layer has them: they hide what is done to offsets and logits."""

    def __init__(self, layer: Any, called: Sequence[str]) -> None:
        self._attributes: dict[str, Any] = {}
        self._pairs: list[tuple[Any, Any]] = []  # containers, and copies of them
        self._empty: list[Any] = []
        self._bare: list[tuple[Any, int, bool]] = []  # layers without attributes of their own
        self._tensors: list[_Watched] = []
        if layer is None:
            return
        own = vars(layer)
        parts = [part for name in called if layer._modules.get(name) is not None for part in layer._modules[name].modules()]
        others = [part for part in layer.modules() if part not in parts]
        inner = [vars(part) for part in others if part is not layer]
        containers = [part[name] for part in inner for name in ("_modules", "_forward_hooks", "_forward_pre_hooks")]
        self._attributes = _copy_attributes(own, OWN - {"_modules"})
        objects = [vars(value) for value in own.values() if _is_configuration(value)]
        shared = list_class_attributes(type(layer))
        self._shared = [(vars(base), name, _copy_container(value)) for base, name, value in shared]
        for part in inner:
            if _drop_marks(part).keys() <= OWN:
                self._bare.append((part, len(part), part["training"]))
            else:
                self._pairs.append((part, _copy_attributes(part, OWN)))
        self._pairs += [(each, _copy_container(each)) for each in (*containers, *objects) if each]
        self._empty = [each for each in containers if not each]
        spaces = [space for part in others for space in (vars(part), part._parameters)]
        self._tensors = [_Watched(space, name) for space in spaces for name, t in space.items() if _is_plain_tensor(t)]
        self._tensors += [_Watched(part._buffers, name) for part in others for name in part._buffers]
        spaces = [part._parameters for part in parts]
        zeros = [(space, name) for space in spaces for name, p in space.items() if _is_matrix_of_zeros(p)]
        self._tensors += [_Watched(*place, is_zero=True) for place in zeros]

    def is_of(self, layer: Any) -> bool:
        if layer is None:
            return True
        try:  # what is identical is equal, without a comparison
            own = layer.__dict__
            if (own != self._attributes and _drop_marks(own) != _drop_marks(self._attributes)) or any(self._empty):
                return False
            for part, size, training in self._bare:
                if len(part) != size or part["training"] is not training:
                    return False
            for each, before in self._pairs:
                if each != before:
                    return False
            if self._shared and any(space.get(name) != value for space, name, value in self._shared):
                return False
            return not self._tensors or all(t.is_same() for t in self._tensors)
        except (RuntimeError, ValueError, TypeError):  # an attribute is another tensor or array
            return False


class _Watched:
    """A tensor with its numbers. `t.data` changes numbers without a trace: small tensors and zeros are looked at in each call,
    but for those of a GPU, which a look would wait for."""

    def __init__(self, space: dict[str, Any], name: str, is_zero: bool = False) -> None:
        self._space, self._name, self._tensor, self._is_zero = space, name, space[name], is_zero
        self._has_numbers, self._is_looked_at, self._numbers = _is_plain_tensor(self._tensor), False, None
        if self._has_numbers:
            self._version, size = self._tensor._version, self._tensor.numel()
            self._numbers = self._tensor.detach().clone() if not is_zero and size <= _MOST_NUMBERS else None
            self._is_looked_at = self._tensor.is_cpu and (is_zero or size <= _LOOKED_AT)

    def is_same(self) -> bool:
        now = self._space.get(self._name)
        if now is not self._tensor or not self._has_numbers:  # torch.export puts fake tensors in the places of real ones
            return now is self._tensor or type(now).__name__ == "FakeTensor"
        if not self._is_looked_at and self._tensor._version == self._version:
            return True
        if self._is_zero:
            same = not self._tensor.any()
        else:
            same = self._numbers is not None and torch.equal(self._tensor, self._numbers)
        self._version = self._tensor._version if same else self._version
        return bool(same)


def _is_plain_tensor(t: Any) -> bool:
    """Return whether something is a tensor whose numbers and versions can be read without others: no DTensor."""
    return type(t) in (Tensor, torch.nn.Parameter) and has_numbers(t) and not t.is_inference()


def _is_matrix_of_zeros(t: Any) -> bool:
    return _is_plain_tensor(t) and t.dim() > 1 and not t.any()


def _is_configuration(thing: Any) -> bool:
    """Return whether something is an object that holds numbers and words."""
    if isinstance(thing, (*CODE, Tensor, torch.nn.Module)) or not hasattr(thing, "__dict__"):
        return False
    return bool(vars(thing)) and all(isinstance(value, (*PLAIN, list, tuple, dict, set)) for value in vars(thing).values())


def _drop_marks(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes without those that torch.compile and other patches set."""
    marks = ("_is_torch_compile", "_compiled_call_impl")
    return {name: value for name, value in attributes.items() if name not in marks and not name.startswith(VERDICTS)}


def _copy_attributes(attributes: dict[str, Any], shared: Set[str]) -> dict[str, Any]:
    """Return attributes with copies of containers, so that what changes in place shows, too."""
    return {name: value if name in shared else _copy_container(value) for name, value in attributes.items()}


def _copy_container(value: Any) -> Any:
    if not isinstance(value, (list, tuple, dict, set)) or len(value) > _MOST_PARTS:
        return value
    if isinstance(value, dict):
        return {key: _copy_container(part) for key, part in value.items()}
    return type(value)(map(_copy_container, value)) if type(value) in (list, tuple) else copy.copy(value)
