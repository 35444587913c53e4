"""Flags out of settings: each field of Config is one option of every command that takes settings.

A command with a record of its own gets one option per field of that (`with_record`). A flag that is not typed stays
None here, so that the values of a --config file are not hidden by defaults: flags win over the file, the file over the
defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, fields
from typing import Annotated, Any

import typer

from halocline.config import Config, build, read_file

_KIND = inspect.Parameter.KEYWORD_ONLY
_TYPES: dict[str, Any] = {"int": int, "int | None": int, "float": float, "bool": bool, "tuple[str, ...]": list[str]}


def with_settings(
    *,
    server: bool,
    model_argument: bool = False,
    defaults: Mapping[str, object] | None = None,
    only: Collection[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of Config and --config; it is called with the finished Config as `config`.

    `server`: also those that only a server has. `model_argument`: the model may be named without its flag.
    `defaults`: where the command's differ from Config's. `only`: the settings that this command has a use for; those of
    a file may be more.
    """
    defaults = dict(defaults or {})
    shown = [each for each in fields(Config) if server or not each.metadata["server"]]
    if only is not None:
        shown = [each for each in shown if each.name in only]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(config_file: str | None = None, model_argument: str | None = None, **given: Any) -> None:
            typed = {each.name: given.pop(each.name) for each in shown}
            typed["model"] = model_argument or typed["model"]
            flags = {name: value for name, value in typed.items() if value is not None}
            config = build(defaults, read_file(config_file) if config_file else {}, flags)
            command(config=config, **given)

        own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "config"]
        settings = [_parameter(each, defaults.get(each.name, each.default)) for each in shown]
        parameters = [*([_MODEL] if model_argument else []), *own, _CONFIG_FILE, *settings]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([each.replace(kind=_KIND) for each in parameters])  # type: ignore[attr-defined]
        # Typer reads the hints beside the signature; they must not be those of `run` itself.
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def with_record(record: type, argument: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a record of settings as options; it is called with the finished one as `settings`.

    `argument`: the field that is given without a flag, if there is one. The record checks itself as a whole when it is
    made.
    """
    flags = [each for each in fields(record) if each.name != argument]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            typed = {name: value for name, value in given.items() if value not in (None, [])}
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in typed.items()}
            command(settings=record(**values))

        parameters = [_parameter(each, each.default) for each in flags]
        if argument is not None:
            text = next(each.metadata["help"] for each in fields(record) if each.name == argument)
            place = typer.Argument(metavar=argument.upper(), help=text, show_default=False)
            parameters.insert(0, _keyword(argument, Annotated[str | None, place]))
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def flag_of(name: str) -> str:
    """Return the flag of a setting: `kv_bytes` is `--kv-bytes`."""
    return "--" + name.replace("_", "-")


def flag_names() -> list[str]:
    """Return the flags of all settings."""
    return [flag_of(each.name) for each in fields(Config)]


def default_text(value: object) -> str:
    """Return how --help and the reference print a default."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parameter(setting: Field[Any], value: object) -> inspect.Parameter:
    kind = _TYPES.get(str(setting.type), str)
    flag = flag_of(setting.name)
    names = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    shown = "" if value is None else f" [{default_text(value)}]"
    option = typer.Option(names, help=setting.metadata["help"] + shown, show_default=False)
    return _keyword(setting.name, Annotated[kind | None, option])  # type: ignore[valid-type]


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, _KIND, default=None, annotation=annotation)


_MODEL = _keyword("model_argument", Annotated[str | None, typer.Argument(metavar="MODEL", help="the same as --model")])
_CONFIG_FILE = _keyword(
    "config_file",
    Annotated[str | None, typer.Option("--config", metavar="FILE", help="YAML file of settings; flags win over it")],
)
