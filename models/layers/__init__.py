"""The sequence layers. `LAYERS` maps a layer's name, as params.yaml writes it, to its class.

Adding a layer is one file here: every class defined in a file of this folder that has a `name` of its own is found.
"""

from __future__ import annotations

import importlib
import pkgutil

from models.layers.layer import Layer


def find() -> dict[str, type[Layer]]:
    """Every layer of this folder by name; two layers of one name are a mistake of ours."""
    layers: dict[str, type[Layer]] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Layer) and value.__module__ == module.__name__ and "name" in vars(value):
                assert value.name not in layers, f"two layers are named {value.name}"
                layers[value.name] = value
    return layers


LAYERS: dict[str, type[Layer]] = find()
