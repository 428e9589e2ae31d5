"""Where settings come from: built-in < TOML file < ``DISAGG_SECTION__KEY`` < command-line flags, and which of them won.

Each value is converted and checked on its own, against the type and the limits in ``disagg.config``, as soon as it is read:
a bad line in the TOML file is refused even where a flag overrides it, and the error can say where the value came from.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec

from disagg.config import Config, parse_address, parse_size
from disagg.errors import ConfigError

Origins = Mapping[str, str]
"""Setting name (``server.port``) → where its value came from: ``built-in``, the file's path, a variable or a flag."""

_PREFIX = "DISAGG_"
_FLAGS = {
    "model.path": "--model",
    "model.name": "--served-model-name",
    "kv.dtype": "--kv-dtype",
    "kv.memory": "--kv-memory",
    "kv.poison": "--kv-poison",
    "kv.verify": "--verify-kv",
    "cluster.listen": "--cluster-listen",
    "cluster.token_file": "--cluster-token-file",
    "cluster.lease_s": "--cluster-lease-s",
    "cluster.tls_cert": "--cluster-tls-cert",
    "cluster.tls_key": "--cluster-tls-key",
    "cluster.tls_ca": "--cluster-tls-ca",
    "log.format": "--log-format",
    "log.level": "--log-level",
    "metrics.compat": "--metrics-compat",
}
"""Flags whose plain field name would say too little on a command line."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of one section of Config."""

    section: str
    field: str
    annotation: Any  # Annotated[type, Meta(limits, description)]
    default: Any

    @property
    def type(self) -> Any:
        """Without its limits: int, float, str, bool or Literal[…]."""
        return get_args(self.annotation)[0]

    @property
    def meta(self) -> msgspec.Meta:
        meta: msgspec.Meta = get_args(self.annotation)[1]
        return meta

    @property
    def name(self) -> str:
        return f"{self.section}.{self.field}"

    @property
    def env(self) -> str:
        return f"{_PREFIX}{self.section}__{self.field}".upper()

    @property
    def flag(self) -> str:
        return _FLAGS.get(self.name, "--" + self.field.replace("_", "-"))

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def allowed(self) -> str:
        """What an error says after "must be"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.type is bool:
            return "true or false"
        if self.type is str:
            return "a string"
        kind = "an integer" if self.type is int else "a number"
        meta = self.meta
        limits = [
            f"{words} {limit}"
            for words, limit in (("at least", meta.ge), ("above", meta.gt), ("at most", meta.le), ("below", meta.lt))
            if limit is not None
        ]
        return " ".join([kind, " and ".join(limits)]).strip()


def _settings() -> Iterator[Setting]:
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type):
            yield Setting(section.name, field.name, field.type, field.default)


SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _settings()}
_SECTIONS = list(dict.fromkeys(setting.section for setting in SETTINGS.values()))
_BY_ENV = {setting.env: setting for setting in SETTINGS.values()}


def load_config(toml_path: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> tuple[Config, Origins]:
    """The effective configuration and the origin of each setting.

    ``flags``: setting name → value, only those that were given. Strings are converted, as for ``environ``.

    Raises ConfigError, naming the setting, its origin and what is allowed, for an unreadable file, an unknown name (with the
    nearest known one) and a value out of range.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    origins = dict.fromkeys(SETTINGS, "built-in")
    for setting, raw, origin in _given(toml_path, environ, flags):
        strict = origin == str(toml_path)  # TOML has types; the environment and the command line have text
        values[setting.section][setting.field] = _convert(setting, raw, origin, strict)
        origins[setting.name] = origin
    config = msgspec.convert(values, Config)
    _check(config, origins)
    return config, origins


def dump_toml(config: Config, origins: Origins | None = None) -> str:
    """``config`` as TOML that ``load_config`` reads back to an equal one; with ``origins``, a comment on each line."""
    lines: list[str] = []
    for section, fields in msgspec.to_builtins(config).items():
        lines += [*([""] if lines else []), f"[{section}]"]
        for field, value in fields.items():
            comment = f"  # {origins[f'{section}.{field}']}" if origins else ""
            lines.append(f"{field} = {_toml(value)}{comment}")
    return "\n".join(lines) + "\n"


def _toml(value: bool | int | float | str) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's, but for DEL
    return str(value).lower()  # "True" → "true"; numbers are spelled alike


def _given(toml_path: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Iterator[tuple[Setting, Any, str]]:
    """Each value that somebody set, weakest source first: (setting, raw value, origin)."""
    if toml_path is not None:
        yield from _from_toml(toml_path)
    for variable, value in environ.items():
        if variable.startswith(_PREFIX):
            if variable not in _BY_ENV:
                raise ConfigError(f"unknown environment variable {variable}{_nearest(variable, _BY_ENV)}")
            yield _BY_ENV[variable], value, variable
    for name, value in flags.items():
        yield SETTINGS[name], value, SETTINGS[name].flag


def _from_toml(path: Path) -> Iterator[tuple[Setting, Any, str]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for section, fields in document.items():
        if section not in _SECTIONS:
            # A key at the top level belongs to the section that has such a field.
            suggestion = _nearest(section, _SECTIONS) or _nearest(section, SETTINGS)
            raise ConfigError(f"{path}: unknown section {section!r}{suggestion}")
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}: {section} is a section: write [{section}] and its settings below")
        for field, value in fields.items():
            name = f"{section}.{field}"
            if name not in SETTINGS:
                raise ConfigError(f"{path}: unknown setting {name!r}{_nearest(name, SETTINGS)}")
            yield SETTINGS[name], value, str(path)


def _nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """``; did you mean …?``: the same field elsewhere, else the most similar name, else nothing."""
    field = name.rpartition(".")[2]
    same = [candidate for candidate in known if candidate.rpartition(".")[2] == field]
    close = same or difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _convert(setting: Setting, raw: Any, origin: str, strict: bool) -> Any:
    """``raw`` as the setting's type, within its limits; not ``strict``: text is parsed."""
    try:
        value = msgspec.convert(raw, setting.annotation, strict=strict)
    except msgspec.ValidationError as error:
        raise _refusal(setting, raw, origin, setting.allowed) from error
    if isinstance(value, float) and not math.isfinite(value):
        raise _refusal(setting, raw, origin, "a finite number")  # NaN passes every limit
    return value


def _check(config: Config, origins: Origins) -> None:
    """What a type and its limits cannot say."""

    def require(name: str, value: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise _refusal(SETTINGS[name], value, origins[name], allowed)

    host = config.server.host
    require("server.host", host, _is_host(host), "an address or a host name (the port is a setting of its own)")
    require("model.path", config.model.path, bool(config.model.path), f"{SETTINGS['model.path'].meta.description}")
    memory, listen = config.kv.memory, config.cluster.listen
    require("kv.memory", memory, memory == "auto" or _can(parse_size, memory), "auto or a size, such as 2GiB")
    endpoint = config.tracing.otlp_endpoint
    require("tracing.otlp_endpoint", endpoint, not endpoint or _is_url(endpoint), "empty or a URL such as http://127.0.0.1:4318")
    require("cluster.listen", listen, not listen or _can(parse_address, listen), "empty or HOST:PORT, such as 10.0.0.1:7000")


def _can(parse: Callable[[str], Any], text: str) -> bool:
    try:
        parse(text)
    except ConfigError:
        return False
    return True


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(host) and not any(character in ":/[]" or character.isspace() for character in host)
    return True


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _refusal(setting: Setting, value: Any, origin: str, allowed: str) -> ConfigError:
    shown = repr(value) if isinstance(value, str) else _toml(value) if isinstance(value, int | float) else type(value).__name__
    return ConfigError(f"{setting.name} = {shown} (from {origin}): must be {allowed}")
