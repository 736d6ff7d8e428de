"""Functions with hand-written gradients, declared without a framework and made for each framework when it is loaded.

Made at load and not at first use, so that torch.compile finds its operations registered.
"""

from collections.abc import Callable

_declared: list[tuple[tuple[Callable, Callable, int, int], dict[str, Callable]]] = []
_makers: dict[str, Callable] = {}


def declare(forward: Callable, backward: Callable, outputs: int, saved: int) -> dict[str, Callable]:
    """The function for each loaded framework, by the framework's name; a framework loaded later adds its own."""
    function = (forward, backward, outputs, saved)
    made = {framework: make(*function) for framework, make in _makers.items()}
    _declared.append((function, made))
    return made


def make_all(framework: str, make: Callable) -> None:
    """Called by a framework's module, once, at the end of its import."""
    _makers[framework] = make
    for function, made in _declared:
        made[framework] = make(*function)
