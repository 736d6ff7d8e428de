"""Functions with hand-written gradients, declared without a framework and made for each framework when it is loaded.

Made at load and not at first use, so that torch.compile finds its operations registered.
"""

from collections.abc import Callable

_declared: list[tuple[Callable, Callable, int, dict[str, Callable]]] = []
_makers: dict[str, Callable] = {}


def declare(forward: Callable, backward: Callable, outputs: int) -> dict[str, Callable]:
    """The function for each loaded framework, by the framework's name; a framework loaded later adds its own."""
    made = {framework: make(forward, backward, outputs) for framework, make in _makers.items()}
    _declared.append((forward, backward, outputs, made))
    return made


def make_all(framework: str, make: Callable) -> None:
    """Called by a framework's module, once, at the end of its import."""
    _makers[framework] = make
    for forward, backward, outputs, made in _declared:
        made[framework] = make(forward, backward, outputs)
