"""The commands as the help lists them: in groups, each with what it does and two examples."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMMANDS", "Entry"]


@dataclass(frozen=True)
class Entry:
    """A command in the help. Each example is a command line and what it does."""

    group: str
    about: str
    examples: tuple[tuple[str, str], ...]


_RECORD, _READ, _SERVE, _KEEP = "Record", "Read", "Serve", "House-keeping"

COMMANDS = {
    "run": Entry(
        _RECORD,
        "Run a script as torchrun does, and record every collective of every rank.",
        (
            ("rankcall run --nproc-per-node 4 train.py", "record four ranks"),
            ("rankcall run --serve 8088 --nproc-per-node 8 train.py", "and show a live page"),
        ),
    ),
    "exec": Entry(
        _RECORD,
        "Run any command, and record every rank that it starts.",
        (
            ("rankcall exec -- torchrun --nproc-per-node 4 train.py", "below torchrun"),
            ("rankcall exec --on-hang abort -- srun python train.py", "end a job that hangs"),
        ),
    ),
    "report": Entry(
        _READ,
        "Report which ranks came last, which waited, and how fast the collectives were.",
        (
            ("rankcall report -o report.html", "the latest run here, as a page"),
            ("rankcall report run.tar.zst --attempt 1", "an attempt from an archive"),
        ),
    ),
    "diagnose": Entry(
        _READ,
        "Say which rank holds the others up, in which call, from which line.",
        (
            ("rankcall diagnose --stacks", "the job that hangs on this host"),
            ("rankcall diagnose run.tar.zst", "an archive, after the job has ended"),
            ("rankcall diagnose --log job.log", "a log, of a job without rankcall"),
        ),
    ),
    "explain-policy": Entry(
        _READ,
        "Print the policy of restarts, and what it says about a run's last failure.",
        (
            ("rankcall explain-policy", "the latest run here"),
            ("rankcall explain-policy run.tar.zst", "would a restart have helped?"),
        ),
    ),
    "compare": Entry(
        _READ,
        "Say what differs between two runs, or since when one run is slower.",
        (
            ("rankcall compare old.tar.zst new.tar.zst", "two runs"),
            ("rankcall compare rankcall-runs/latest", "changes within one run"),
        ),
    ),
    "profile": Entry(
        _READ,
        "Profile ranks of a job that runs on this host, line by line.",
        (
            ("rankcall profile", "a rank that holds the others up, and one that does not"),
            ("rankcall profile --ranks 5,6 --seconds 10", "two ranks of the only live job"),
        ),
    ),
    "export": Entry(
        _READ,
        "Write a run's records for Perfetto, as Parquet or JSON lines.",
        (
            ("rankcall export --to perfetto", "a timeline for ui.perfetto.dev"),
            ("rankcall export --to parquet run.tar.zst -o run.parquet", "a table of an archive"),
        ),
    ),
    "top": Entry(
        _READ,
        "Show the state of every rank, live.",
        (
            ("rankcall top", "the only live job of this host"),
            ("rankcall top --once rankcall-runs/latest", "print where the ranks stand, and exit"),
        ),
    ),
    "ps": Entry(
        _READ,
        "List the jobs that run on this host.",
        (
            ("rankcall ps", "a table"),
            ("rankcall ps --json", "for scripts"),
        ),
    ),
    "serve": Entry(
        _SERVE,
        "Serve a live page of a job, which everyone who has the link can read.",
        (
            ("rankcall serve", "the only live job of this host"),
            ("rankcall serve --host 0.0.0.0 --port 8088", "for browsers on other machines"),
        ),
    ),
    "mcp": Entry(
        _SERVE,
        "Let an assistant read runs, over the MCP protocol.",
        (
            ("rankcall mcp", "the runs below this folder"),
            ("rankcall mcp /data/jobs", "those below another one"),
        ),
    ),
    "collect": Entry(
        _KEEP,
        "Put a run that is spread over nodes into one file.",
        (
            ("rankcall collect -o run.tar.zst", "the latest run here, to copy or send"),
            ("rankcall collect node-*.tar.zst -o run.tar.zst", "join the archives of nodes"),
        ),
    ),
    "clean": Entry(
        _KEEP,
        "Free the memory that the records of killed jobs take on this host.",
        (
            ("rankcall clean", "jobs that ended more than a day ago"),
            ("rankcall clean --all", "all jobs that have ended"),
        ),
    ),
    "doctor": Entry(
        _KEEP,
        "Say whether recording will work here.",
        (
            ("rankcall doctor", "on this machine"),
            ("srun --nodes 2 rankcall doctor", "on the nodes of a job"),
        ),
    ),
    "build": Entry(
        _KEEP,
        "Build the native recorder and RPC agent ahead of time.",
        (
            ("rankcall build", "in an image, or before the first job"),
            ("RANKCALL_CACHE=/opt/rankcall rankcall build", "for all users of an image"),
        ),
    ),
    "bar": Entry(
        _KEEP,
        "Keep a node out of a job that carries on.",
        (
            ("rankcall bar node-7", "of the only live job of this host"),
            ("rankcall bar node-7 RUN --for 86400 --reason 'fan is broken'", "for a day"),
        ),
    ),
    "unbar": Entry(
        _KEEP,
        "Let a node that was barred into a job again.",
        (
            ("rankcall unbar node-7", "in the only live job of this host"),
            ("rankcall unbar node-7 RUN", "in another one"),
        ),
    ),
}
