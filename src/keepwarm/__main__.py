"""The command line, as `keepwarm` and as `python -m keepwarm`."""

import signal


def main() -> None:
    """Run it. Until a verb runs, Ctrl-C simply ends the process: there is nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as in `&`
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from keepwarm.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
