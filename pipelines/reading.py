"""Reading a study's params.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipelines import consistency, secrets
from pipelines.mistakes import described, explain
from pipelines.params import Params

NAME = Path("params.yaml")


def load(folder: Path) -> Params:
    """The parameters of the study in `folder`. Raises ValueError with one sentence: the key, what was found, what is allowed."""
    return parse(read(folder), folder / NAME)


def read(folder: Path) -> dict[str, Any]:
    """params.yaml as plain values, by the YAML reader that DVC uses too."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    path = folder / NAME
    try:
        value = YAML(typ="safe").load(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{folder or '.'} has no params.yaml, so it is no study; `strata study NAME` makes one.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = (error.problem or str(error)).split("\n")[0]
        raise ValueError(f"{path}, line {mark.line + 1 if mark else '?'}: is not valid YAML: {problem}.") from error
    except YAMLError as error:
        raise ValueError(f"{path}: is not valid YAML: {str(error).splitlines()[0]}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {described(value)}, wanted a table of parameters.")
    return value


def parse(value: dict[str, Any], path: Path = NAME) -> Params:
    """Validate plain values as a study's parameters."""
    try:
        secrets.refuse(value)
        params = Params.model_validate(value)
        consistency.check(params)
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error, Params)}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return params
