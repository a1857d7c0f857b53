"""A command of gpuckpt as Typer runs it: its usage line, and configuration as defaults below what was typed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from gpuckpt.cli import origins
from gpuckpt.cli.config import OF_ONE_RUN, Configuration, Option, configuration
from gpuckpt.cli.configfile import read_files
from gpuckpt.cli.options import elsewhere, location, with_colon
from gpuckpt.model.errors import GpuckptError, UsageError
from gpuckpt.model.location import Location

CONFIGURATION = "gpuckpt.configuration"
"""Where a run keeps what the files said, in Typer's context."""
NUMBERS = ("SECONDS", "N", "K", "LEVEL", "RATE")
PATHS = ("FILE", "DIR", "IMAGE")
"""Metavars of options whose values are numbers, and paths."""
PLACES = ("target", "source", "image", "push", "against")
"""Arguments and options that may name another host."""


class Verb(TyperCommand):
    """A command whose options take their defaults from files."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if not self.hidden:
            self.params.append(_config_option())

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """[OPTIONS] and the arguments, without Typer's braces around what is required."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def make_parser(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Each flag that a file can set has a --no-FLAG: the command line has the last word."""
        parser = super().make_parser(ctx)
        for name, option in _options_of(self).items():
            if getattr(option, "is_flag", False) and name not in OF_ONE_RUN:
                parser.add_option(
                    obj=option, opts=[f"--no-{name}"], dest=option.name, action="store_const", const=False
                )
        return parser

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the command line over what the files say. Help and TAB ask for no file."""
        if not (self.hidden or ctx.resilient_parsing):
            typed, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            if not typed.get("help"):
                self._configure(ctx, typed)
        return super().parse_args(ctx, args)

    def _configure(self, ctx: Any, typed: Mapping[str, Any]) -> None:
        explicit = typed.get("config")
        files = read_files(explicit if explicit is not None else os.environ.get("GPUCKPT_CONFIG") or None)
        # Judged are whole files; without any, the other commands need not be built.
        found = configuration(files, _judges(ctx) if any(file.content for file in files) else {})
        options = _options_of(self)
        repairs = self.name == "restore" and typed.get("tree") is not None
        series = typed.get("into") is not None
        where = _place(str(self.name), typed)
        settings = found.for_run(str(self.name), options, where, repairs=repairs, series=series)
        ctx.meta[CONFIGURATION] = found, settings
        ctx.default_map = {options[name].name: setting.value for name, setting in settings.items()}

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command. What it refuses of an option that nobody typed is traced to its file."""
        _, settings = ctx.meta.get(CONFIGURATION, (None, {}))
        typed = {_long_name(item) for item in self.params if was_typed(ctx, item.name)}
        origins.untyped.set({name: setting for name, setting in settings.items() if name not in typed})
        try:
            return super().invoke(ctx)
        except UsageError as error:
            origins.trace(error)
            raise


def _config_option() -> TyperOption:
    return TyperOption(
        param_decls=["--config"],
        metavar="FILE",
        expose_value=False,
        help="Read defaults from FILE instead of /etc/gpuckpt/config.toml and ~/.config/gpuckpt/config.toml.",
    )


def _options_of(command: Any) -> dict[str, Any]:
    """By long name, without the dashes. What is hidden is for tests."""
    options = [item for item in command.params if item.param_type_name == "option" and not item.hidden]
    return {_long_name(item): item for item in options}


def _long_name(item: Any) -> str:
    return str(max(item.opts, key=len)).removeprefix("--")


def all_options() -> dict[str, dict[str, Any]]:
    """Typer's options, by command and long name."""
    from gpuckpt.cli.app import program  # noqa: PLC0415  it is made of verbs

    # A run has built only the command that it is; what files say is about all of them.
    whole: Any = typer.main.get_command(program())
    return {name: _options_of(one) for name, one in whole.commands.items() if not one.hidden}


def _judges(ctx: Any) -> dict[str, dict[str, Option]]:
    return {
        command: {name: _judge(ctx, item) for name, item in items.items()} for command, items in all_options().items()
    }


def _judge(ctx: Any, item: Any) -> Option:
    def check(value: Any) -> None:
        try:
            item.type_cast_value(ctx, value)
        except (typer.BadParameter, GpuckptError) as error:
            raise ValueError(error.message.rstrip(".")) from None

    return Option(
        flag=bool(getattr(item, "is_flag", False)),
        multiple=item.multiple,
        number=item.metavar in NUMBERS,
        path=item.metavar in PATHS,
        check=check,
    )


def _place(command: str, typed: Mapping[str, Any]) -> Location | None:
    """The other host that was typed. What makes no sense is refused by the command, in its own words."""
    for name in PLACES:
        if isinstance(typed.get(name), str):
            try:
                where = location(with_colon(typed[name])) if command == "migrate" else elsewhere(typed[name])
            except GpuckptError:
                continue
            if where is not None:
                return where
    return None


def was_typed(ctx: Any, name: str | None) -> bool:
    """Whether a parameter stands on the command line, and is not from a file."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def configuration_of(ctx: Any) -> Configuration:
    """What the files said for the command that runs."""
    found: Configuration = ctx.meta[CONFIGURATION][0]
    return found
