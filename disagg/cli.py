"""The command line: ``disagg serve | worker | chat | verify | doctor | status | top | drain | flip | install-unit | config``.

The flags of the configuration are generated from ``disagg.settings.SETTINGS``: a new field of a config struct is a flag, an
environment variable, a line of help and a TOML key at once. Nothing here knows a default.

Exit codes: 0 done; 1 it failed while running (``status``: not ready; ``verify``: not equal); 2 wrong usage or settings
(``status``: no answer; ``verify``: a server could not start).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg import __version__
from disagg.config import Config
from disagg.errors import ConfigError, DisaggError
from disagg.settings import SETTINGS, Origins, Setting, dump_toml, load_config

if TYPE_CHECKING:
    from disagg.remote import Remote

_EXAMPLES = """\
examples:
  disagg serve                                     the built-in model on http://127.0.0.1:8000
  disagg serve --model ./Llama-3.1-8B --port 9000  a Hugging Face folder on another port
  disagg serve --prefill 2 --decode 4              2P4D: two prefill workers, four decode workers
  disagg worker --join 10.0.0.1:7000 --prefill 0   lend a decode worker to the server on another host
  disagg chat                                      start a server of its own and talk to it
  echo "Why is the sky blue?" | disagg chat        one answer, then exit
  disagg verify --model ./Llama-3.1-8B             disaggregated output equals colocated output: prove it
  disagg doctor                                    can this host serve, and how fast does it move KV?
  disagg status                                    is it ready, and what is it doing?
  disagg top                                       the same, live, with tokens per second and percentiles
  disagg drain --wait                              let it finish what it has, and admit nothing more
  disagg flip decode-1 prefill                     let a worker do something else, without dropping a stream
  disagg install-unit --dry-run                    the systemd service for this host
  disagg config show --origin                      every setting, and where it came from
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Expected failures are one line on stderr."""
    _have_standard_streams()
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
    except DisaggError as error:
        print(f"disagg: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    return code


def _have_standard_streams() -> None:
    """A closed stream's number would be given to a socket, and what is printed to the client; a name may not fit the encoding."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disagg",
        description="Serve an LLM with prefill and decode in separate processes, behind an OpenAI-compatible API.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"disagg {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    settings = _settings_parser()

    def command(name: str, run: Any, help: str, description: str, with_settings: bool) -> argparse.ArgumentParser:
        parents = [settings] if with_settings else []
        result = commands.add_parser(name, help=help, description=description, parents=parents, allow_abbrev=False)
        result.set_defaults(command=run)
        return result

    command(
        "serve",
        _serve,
        "start the server",
        "Start the server and its workers; Ctrl-C or SIGTERM drains and ends. Settings: built-in < --config file < "
        "DISAGG_SECTION__KEY in the environment < flags.",
        with_settings=True,
    )

    worker = command(
        "worker",
        _worker,
        "lend this host's workers to a server on another host",
        "Start workers here for the server at --join (disagg serve --cluster-listen), over a link that both sides prove with the "
        "secret in --token-file. Joins again whenever the link is lost; Ctrl-C or SIGTERM leaves. The flags of serve say which "
        "workers (--prefill, --decode), with which model and memory; what all workers of a server share comes from the server.",
        with_settings=True,
    )
    worker.add_argument("--join", metavar="HOST:PORT", required=True, help="the server's --cluster-listen address")
    worker.add_argument(
        "--token-file",
        dest="cluster.token_file",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="short for --cluster-token-file",
    )
    worker.add_argument("--name", metavar="NAME", default="", help="what the server calls this node (default: the host's name)")

    chat = command(
        "chat",
        _chat,
        "talk to a model in the terminal",
        "Talk to a running server (--url), or start one just for this conversation; then the flags of serve apply.",
        with_settings=True,
    )
    chat.add_argument(
        "--url",
        metavar="URL",
        help="a running server, such as http://127.0.0.1:8000; --model is then a name, and the first key in --api-key-file is "
        "shown to it",
    )
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: the rest of the context)")
    chat.add_argument("--temperature", type=float, metavar="T", help="0 = always the most likely token")

    verify = command(
        "verify",
        _verify,
        "prove that disaggregated output equals colocated output",
        "Run the same prompts colocated, colocated again as a control, and disaggregated with KV digests, on servers of its own; "
        "the flags of serve apply. Exit code 0: equal; 1: not; 2: a server could not start.",
        with_settings=True,
    )
    verify.add_argument("--prompts", type=int, metavar="N", default=12, help="number of prompts (default: %(default)s)")
    verify.add_argument("--tokens", type=int, metavar="N", default=32, help="tokens of each answer (default: %(default)s)")
    verify.add_argument("--seed", type=int, metavar="N", default=0, help="other prompts and draws (default: %(default)s)")
    verify.add_argument("--json", action="store_true", help="print the result for machines instead of a table")

    status = command("status", _status, "show a running server's workers", "Exit code 0: ready; 1: not; 2: no answer.", False)
    _add_server(status)
    status.add_argument("--json", action="store_true", help="print the server's answer instead of a table")

    top = command(
        "top",
        _top,
        "watch a running server",
        "Workers, KV blocks, tokens per second and percentiles of the last seconds, until Ctrl-C.",
        False,
    )
    _add_server(top)
    top.add_argument("--interval", type=_seconds, metavar="S", default=1.0, help="seconds between frames (default: %(default)g)")
    top.add_argument("--once", action="store_true", help="print one frame, with figures since the server's start")

    doctor = command(
        "doctor",
        _doctor,
        "check whether this host can serve",
        "Look for what would keep the server from starting or make it slow, with these settings (the flags of serve apply), and "
        "measure how fast KV moves. Exit code 0: nothing failed; 1: something did.",
        with_settings=True,
    )
    doctor.add_argument("--json", action="store_true", help="print the findings for machines")

    drain = command(
        "drain",
        _drain,
        "let a running server finish and admit nothing more",
        "Ask a server on this host, over its admin socket, to admit nothing more; it goes on running. Exit code 0: done; "
        "1: with --wait, streams are still running; 2: no answer.",
        False,
    )
    _add_admin_socket(drain)
    drain.add_argument("--wait", action="store_true", help="until the last stream has ended")
    drain.add_argument("--resume", action="store_true", help="admit again")

    flip = command(
        "flip",
        _flip,
        "change what a worker of a running server does",
        "Ask a server on this host, over its admin socket, to give one of its workers another role: what the worker has runs to "
        "its end, or goes on elsewhere; then it starts again. Returns when it serves; Ctrl-C before that calls it off, unless "
        "the worker has ended already. Exit code 0: done; 1: refused, or not ready yet; 2: no answer.",
        False,
    )
    flip.add_argument("worker", metavar="WORKER", help="its name, as in disagg status")
    flip.add_argument("role", metavar="ROLE", choices=["prefill", "decode", "mixed"], help="prefill, decode or mixed")
    _add_admin_socket(flip)
    flip.add_argument(
        "--wait-s", type=float, metavar="S", default=30.0, help="seconds for what it has to end by itself (default: %(default)g)"
    )

    install = command(
        "install-unit",
        _install_unit,
        "install a systemd service for this host",
        "Write the systemd unit, its user, its directories and an example configuration, and say what to do next.",
        False,
    )
    kind = install.add_mutually_exclusive_group()
    kind.add_argument("--cpu", dest="device", action="store_const", const="cpu", default="auto", help="without access to GPUs")
    kind.add_argument("--gpu", dest="device", action="store_const", const="gpu", help="with access to the GPUs of this host")
    install.add_argument("--dir", type=Path, metavar="DIR", default=Path("/"), help="write below DIR (default: %(default)s)")
    install.add_argument("--dry-run", action="store_true", help="print the files instead of writing them")

    config = command("config", None, "inspect the configuration", "Inspect the configuration.", False)
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print the effective settings as TOML",
        parents=[settings],
        description="Print the effective settings as TOML.",
    )
    show.add_argument("--origin", action="store_true", help="say in a comment where each value came from")
    show.set_defaults(command=_config_show)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file whose first key is shown to the server")


def _add_admin_socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--socket", metavar="PATH", default="", help="its admin socket (default: where --url's server has it)")


def _seconds(text: str) -> float:
    """A time between frames. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds


def _settings_parser() -> argparse.ArgumentParser:
    """--config and one flag per setting; only flags that were given are in the result, under the setting's name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", dest="toml_path", type=Path, metavar="FILE", help="settings in TOML")
    groups = {section: parser.add_argument_group(section) for section in dict.fromkeys(s.section for s in SETTINGS.values())}
    for setting in SETTINGS.values():
        default = f"{setting.default}".lower() if setting.type is bool else f"{setting.default}" or "empty"
        text = f"{setting.meta.description} (default: {default})".replace("%", "%%")
        group = groups[setting.section]
        if setting.type is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(setting.flag, dest=setting.name, help=text, action=action, default=argparse.SUPPRESS)
        else:
            group.add_argument(setting.flag, dest=setting.name, help=text, metavar=_metavar(setting), default=argparse.SUPPRESS)
    return parser


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "{" + ",".join(setting.choices) + "}"
    if setting.type is str:
        return {"model.path": "MODEL", "kv.memory": "SIZE"}.get(setting.name, setting.field.upper())
    return "S" if setting.field.endswith("_s") else "N"


def _given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name in SETTINGS}


def _load(arguments: argparse.Namespace) -> tuple[Config, Origins]:
    return load_config(arguments.toml_path, os.environ, _given_flags(arguments))


def _serve(arguments: argparse.Namespace) -> int:
    config, _ = _load(arguments)
    from disagg.cores import host_cpus
    from disagg.deployment import planned_roles  # --help should not take as long as these imports
    from disagg.launcher import ProcessLauncher

    with contextlib.closing(ProcessLauncher()) as launcher:
        launcher.start_ahead(len(planned_roles(config, host_cpus())))
        from disagg.serve import run  # nor the workers wait for this one, the longest

        return run(config, launcher)


def _worker(arguments: argparse.Namespace) -> int:
    config, _ = _load(arguments)
    from disagg.node import run

    return run(config, arguments.join, arguments.name)


def _chat(arguments: argparse.Namespace) -> int:
    from disagg import chat
    from disagg.remote import first_key

    flags, key = _given_flags(arguments), ""
    if arguments.url is None:
        _load(arguments)  # a wrong setting is this command's error, not a child's
        model, serve_arguments = None, [*_as_argv(arguments.toml_path, flags)]
    else:
        model, serve_arguments, key_file = flags.pop("model.path", None), [], flags.pop("server.api_key_file", "")
        key = first_key(Path(key_file)) if key_file else ""
        if flags or arguments.toml_path:
            unused = ", ".join([SETTINGS[name].flag for name in flags] or ["--config"])
            raise ConfigError(f"{unused}: a running server (--url) has its own settings")
    sampling = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    options = {name: value for name, value in sampling.items() if value is not None}
    return chat.run(
        url=arguments.url, key=key, serve_arguments=serve_arguments, model=model, system=arguments.system, options=options
    )


def _verify(arguments: argparse.Namespace) -> int:
    flags = _given_flags(arguments)
    if own := [SETTINGS[name].flag for name in ("workers.mode", "workers.fallback", "kv.verify") if name in flags]:
        raise ConfigError(f"{', '.join(own)}: set by verify itself, which compares both modes")
    config, _ = _load(arguments)
    from disagg import verify  # the tokenizer's imports take longer than --help should

    return verify.run(
        config,
        [*_as_argv(arguments.toml_path, flags)],
        num_prompts=arguments.prompts,
        num_tokens=arguments.tokens,
        seed=arguments.seed,
        as_json=arguments.json,
    )


def _as_argv(toml_path: Path | None, flags: dict[str, Any]) -> Iterable[str]:
    if toml_path:
        yield f"--config={toml_path}"
    for name, value in flags.items():
        flag = SETTINGS[name].flag
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        else:
            yield f"{flag}={value}"


def _status(arguments: argparse.Namespace) -> int:
    from disagg import status

    return status.run(_remote(arguments), as_json=arguments.json)


def _top(arguments: argparse.Namespace) -> int:
    from disagg import top

    return top.run(_remote(arguments), interval_s=arguments.interval, once=arguments.once)


def _remote(arguments: argparse.Namespace) -> Remote:
    from disagg.remote import Remote

    return Remote.at(arguments.url, arguments.api_key_file)


def _doctor(arguments: argparse.Namespace) -> int:
    config, _ = _load(arguments)
    from disagg import doctor

    return doctor.run(config, as_json=arguments.json)


def _drain(arguments: argparse.Namespace) -> int:
    from disagg import drain

    return drain.run(url=arguments.url, path=arguments.socket, waits=arguments.wait, resumes=arguments.resume, environ=os.environ)


def _flip(arguments: argparse.Namespace) -> int:
    from disagg import drain

    return drain.flip(
        url=arguments.url,
        path=arguments.socket,
        worker=arguments.worker,
        role=arguments.role,
        wait_s=arguments.wait_s,
        environ=os.environ,
    )


def _install_unit(arguments: argparse.Namespace) -> int:
    from disagg import units

    return units.run(device=arguments.device, root=arguments.dir, is_dry=arguments.dry_run)


def _config_show(arguments: argparse.Namespace) -> int:
    config, origins = _load(arguments)
    sys.stdout.write(dump_toml(config, origins if arguments.origin else None))
    return 0
