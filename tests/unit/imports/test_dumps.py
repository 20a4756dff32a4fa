"""Flight Recorder's dumps as runs: verdicts on planted faults, file names, limits, bad input."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dumps import (
    PROGRAM,
    T0,
    Fault,
    Issued,
    Job,
    Step,
    dump_of,
    simulate,
    write_dumps,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.errors import CorruptRunError, RankcallError
from rankcall.imports.dumps import records
from rankcall.imports.dumps.files import read_dump
from rankcall.imports.dumps.records import op_of_entry, records_of
from rankcall.problems import texts
from rankcall.run.load import load


def diagnose_dumps(folder: Path, ranks: int, *faults: Fault, **options: Any) -> Diagnosis:
    """Simulate a job, write its dumps and diagnose them."""
    return diagnose(load(write_dumps(folder / "dumps", simulate(ranks, 360, faults), **options)))


def causes(found: Diagnosis) -> set[tuple[str, tuple[int, ...]]]:
    """Return the kind and the ranks of each finding."""
    return {(finding.kind, finding.ranks) for finding in found.findings}


# What each fault is called. Its place in the program: 7 ops, of which the last is of the world.
KINDS = {"missing": "missing", "desync": "desync", "mismatch": "mismatch", "lagging": "missing"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", range(7))
def test_the_faulty_rank_is_named_and_no_other(tmp_path: Path, kind: str, place: int) -> None:
    """One rank of 16 does something wrong; the others issue up to 500 ops behind that."""
    if place == 3 and kind != "missing":
        pytest.skip("a message has no such fault")
    if place == 2 and kind == "mismatch":
        pytest.skip("dumps have no split sizes, and each member may have sizes of its own")
    fault = Fault(kind, 5, 140 + place)
    diagnosis = diagnose_dumps(tmp_path, 16, fault)
    finding = diagnosis.findings[0]
    assert finding.kind == KINDS[kind]
    members = simulate(16, 1).groups[["tp", "tp", "ep", "pp", "tp", "dp", "world"][place]][5]
    if len(members) == 2 and kind in ("desync", "mismatch"):
        assert finding.ranks == ()  # two sides of equal size: neither is named
        assert set(finding.victims) >= set(members)
    else:
        assert finding.ranks == (5,)
    assert len(diagnosis.findings) == 1


MIXED = (
    Step("world", "all_reduce", 64, 20),
    Step("world", "exchange", 64, 21),
    Step("world", "coalesced", 0, 22),
    Step("tp", "all_reduce", 64, 23),
)


@pytest.mark.parametrize("batch_is_p2p", [False, True])
@pytest.mark.parametrize("kept", [2000, 31])
@pytest.mark.parametrize("place", range(4))
def test_one_group_with_collectives_batches_and_coalesced_collectives(
    tmp_path: Path, place: int, kept: int, batch_is_p2p: bool
) -> None:
    """All three have entries of one name or of one numbering; the faulty rank is named in each.

    The entries of two groups mix, as if two threads issued them: those of the tensor group lie
    within the batches.
    """
    members = tuple(range(4))
    groups = {"world": dict.fromkeys(members, members), "tp": dict.fromkeys(members, members)}
    job = simulate(4, 60, [Fault("missing", 1, 40 + place)], groups=groups, program=MIXED)
    for rank in members:
        content = dump_of(job, rank, kept=kept, batch_is_p2p=batch_is_p2p)
        entries = content["entries"]
        for at in range(4, len(entries)):
            if entries[at]["process_group"][0] == "1":  # move it before the end of the batch
                entries.insert(at - 2, entries.pop(at))
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(content))
    (finding,) = diagnose(load(tmp_path)).findings
    assert (finding.kind, finding.ranks) == ("missing", (1,))
    assert finding.call_site == f"/job/train.py:{20 + place}"


@pytest.mark.parametrize("ranks", [64, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "pair",
    [
        (Fault("missing", 1, 140), Fault("missing", 62, 141)),
        (Fault("missing", 1, 140), Fault("mismatch", 62, 140)),
        (Fault("desync", 1, 141), Fault("missing", 33, 140)),
        (Fault("lagging", 2, 146), Fault("missing", 33, 147)),
    ],
    ids=lambda pair: "-".join(fault.kind for fault in pair),
)
def test_two_faults_at_once_are_both_named(
    tmp_path: Path, ranks: int, pair: tuple[Fault, Fault]
) -> None:
    """Each of the two faulty ranks has a finding of its own, and no other rank has one."""
    diagnosis = diagnose_dumps(tmp_path, ranks, *pair, frames=False)
    assert causes(diagnosis) == {(KINDS[fault.kind], (fault.rank,)) for fault in pair}


def test_work_that_is_issued_500_deep_behind_the_fault_does_not_hide_it(tmp_path: Path) -> None:
    """The other ranks of the faulty one's groups have each issued 500 ops that cannot begin."""
    job = simulate(16, 700, [Fault("missing", 5, 140)])
    behind = [sum(not call.done for call in issued) for issued in job.issued.values()]
    assert max(behind) == 500
    diagnosis = diagnose(load(write_dumps(tmp_path / "dumps", job)))
    assert causes(diagnosis) == {("missing", (5,))}


def not_out(ranks: int, stuck: dict[int, str], program: Sequence[Step] = PROGRAM) -> Job:
    """Return a job whose other ranks have ended all calls; some do not leave the last of a group.

    torch's watchdog, which notes the ends, does not go on then: later calls seem open as well.
    """
    job = simulate(ranks, 20 * len(program), program=program)
    for rank, family in stuck.items():
        last = max(n for n, call in enumerate(job.issued[rank]) if call.group == family)
        for call in job.issued[rank][last:]:
            call.done = False
    return job


@pytest.mark.parametrize(
    ("stuck", "expected"),
    [
        ({5: "tp"}, {("alone", (5,))}),
        ({5: "dp"}, {("alone", (5,))}),
        ({5: "ep"}, {("alone", (5,))}),
        ({5: "world"}, {("alone", (5,))}),
        ({5: "tp", 12: "tp"}, {("alone", (5,)), ("alone", (12,))}),
        ({12: "tp", 14: "tp"}, {("alone", (12, 14))}),
        # Whoever holds up a whole group is not known, and is not named beside a rank that is.
        (dict.fromkeys((4, 5, 6, 7), "tp"), {("stuck", ())}),
        (dict.fromkeys((4, 5, 6), "tp"), {("stuck", ())}),
        ({5: "tp", **dict.fromkeys((8, 9, 10, 11), "tp")}, {("alone", (5,))}),
    ],
)
def test_a_rank_that_alone_does_not_get_out(
    tmp_path: Path, stuck: dict[int, str], expected: set[tuple[str, tuple[int, ...]]]
) -> None:
    """It is the finding although no rank waits for it: all others have left its oldest call."""
    diagnosis = diagnose(load(write_dumps(tmp_path / "dumps", not_out(16, stuck))))
    assert causes(diagnosis) == expected
    for finding in diagnosis.findings:
        if finding.kind == "alone":
            assert finding.confidence == ("likely" if len(finding.ranks) == 1 else "possible")
            (fact,) = finding.facts
            assert fact.call is not None
            assert fact.others is not None
            family = stuck[finding.ranks[0]]
            members = set(not_out(16, {}).groups[family][finding.ranks[0]])
            assert set(fact.others.numbers) == members - set(finding.ranks)


def test_a_rank_that_alone_does_not_get_out_of_a_broadcast(tmp_path: Path) -> None:
    """Members may leave such a call before others have come; if all others left, it is the same."""
    program = (Step("world", "all_reduce", 1, 16), Step("tp", "broadcast", 64, 10))
    job = not_out(16, {5: "tp"}, program)
    assert causes(diagnose(load(write_dumps(tmp_path / "dumps", job)))) == {("alone", (5,))}


@pytest.mark.parametrize(
    ("family", "expected"),
    [("tp", ("alone", (5,))), ("world", ("alone", (5,))), ("dp", ("missing", (1,)))],
)
def test_a_call_that_only_one_rank_came_to(
    tmp_path: Path, family: str, expected: tuple[str, tuple[int, ...]]
) -> None:
    """The rank that differs is possibly the cause, and not all the others; of two, none differs."""
    job = simulate(16, 140)
    seq = 1 + max(call.seq for call in job.issued[5] if call.group == family and call.peer < 0)
    job.issued[5].append(Issued(141, family, "all_reduce", 64, seq, line=99))
    (finding,) = diagnose(load(write_dumps(tmp_path / "dumps", job))).findings
    assert (finding.kind, finding.ranks) == expected
    assert finding.call_site == "/job/train.py:99"
    assert finding.confidence == ("possible" if finding.kind == "alone" else "likely")


def test_clocks_of_hosts_that_differ_do_not_change_the_verdict(tmp_path: Path) -> None:
    """The clocks of two hosts of eight ranks are 40 s apart, in either direction."""
    for ahead_s in (-40, 40):
        job, folder = simulate(16, 360, [Fault("missing", 5, 140)]), tmp_path / str(ahead_s)
        folder.mkdir()
        for rank in range(16):
            content = dump_of(job, rank)
            for entry in content["entries"]:
                for name in ("time_created_ns", "time_discovered_completed_ns"):
                    if rank >= 8 and entry[name]:
                        entry[name] += ahead_s * 10**9
            (folder / f"rank_{rank}").write_bytes(pickle.dumps(content))
        assert causes(diagnose(load(folder))) == {("missing", (5,))}


def test_a_job_in_which_nothing_hangs_has_no_finding(tmp_path: Path) -> None:
    """All calls have ended."""
    assert diagnose_dumps(tmp_path, 16).findings == []


def test_a_running_job_whose_last_calls_have_just_begun_has_no_finding(tmp_path: Path) -> None:
    """A rank that is some calls behind when all dump at once is no culprit."""
    job = simulate(16, 360, [Fault("missing", 5, 352)])
    last = T0 + 360 * 1_000_000
    assert diagnose(load(write_dumps(tmp_path / "now", job, written_ns=last))).findings == []
    later = write_dumps(tmp_path / "later", job, written_ns=last + 60 * 10**9)
    assert causes(diagnose(load(later))) == {("missing", (5,))}


def test_the_age_is_that_of_the_files_if_they_may_be_right(tmp_path: Path) -> None:
    """Files that are a minute younger than the last call show that it lasted a minute."""
    diagnosis = diagnose_dumps(tmp_path, 16, Fault("missing", 5, 140), written_ns=T0 + 60 * 10**9)
    assert 59 < diagnosis.findings[0].since_s < 60
    assert not any("not known" in problem for problem in diagnosis.problems)


def test_the_age_is_a_lower_bound_if_the_files_were_copied(tmp_path: Path) -> None:
    """Files of another day say nothing; the problem says that ages are lower bounds."""
    diagnosis = diagnose_dumps(tmp_path, 16, Fault("missing", 5, 140))
    assert diagnosis.findings[0].since_s < 1
    assert any("the least that it can be" in problem for problem in diagnosis.problems)


def test_a_rank_without_a_dump_is_possibly_missing(tmp_path: Path) -> None:
    """The rest waits for a rank that left no dump."""
    diagnosis = diagnose_dumps(tmp_path, 16, Fault("missing", 5, 140), without=[5])
    assert causes(diagnosis) == {("missing", (5,))}
    assert diagnosis.findings[0].confidence == "possible"
    assert any("no dump for rank 5 of 16" in problem for problem in diagnosis.problems)


def test_ranks_without_a_dump_that_do_not_matter_are_not_named(tmp_path: Path) -> None:
    """The culprit left a dump, others did not."""
    diagnosis = diagnose_dumps(tmp_path, 16, Fault("missing", 5, 140), without=[2, 6, 11])
    assert [finding.ranks for finding in diagnosis.findings] == [(5,)]


def test_lost_entries_do_not_change_the_verdict(tmp_path: Path) -> None:
    """Dumps with their newest 300 entries, which begin after the call that hangs."""
    for place in (140, 143, 146):
        diagnosis = diagnose_dumps(tmp_path / str(place), 16, Fault("missing", 5, place), kept=300)
        assert [finding.ranks for finding in diagnosis.findings] == [(5,)]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("version", ["2.0", "2.4", "2.10"])
@pytest.mark.parametrize(
    "name", ["_dump_{}", "nccl_trace_rank_{}", "rank_{}", "{}", "host7.rank{}.v2.pkl", "fr-{}.json"]
)
def test_any_name_and_version(tmp_path: Path, name: str, version: str, as_json: bool) -> None:
    """The content decides what a file is, and the name tells the rank."""
    job = simulate(8, 60, [Fault("missing", 3, 42)])
    folder = write_dumps(tmp_path / "d", job, name, version=version, as_json=as_json)
    (folder / "README.md").write_text("# 2 dumps\n")
    assert causes(diagnose(load(folder))) == {("missing", (3,))}


def test_a_call_that_gloo_never_retired_is_no_hang(tmp_path: Path) -> None:
    """Torch leaves a call unretired now and then. A later barrier shows that it has ended."""
    for rank in range(4):
        content = dump_of(simulate(4, 7, groups={"world": WORLD_OF_4}, program=IN_WORLD), rank)
        for entry in content["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("nccl", "gloo")
            entry["state"], entry["time_discovered_completed_ns"] = "scheduled", None
        content["entries"][5]["profiling_name"] = "gloo:broadcast"
        content["entries"][5]["retired"] = rank != 3
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(content))
    assert diagnose(load(tmp_path)).findings == []


def test_archives_of_dumps(tmp_path: Path) -> None:
    """A tar file is read like the directory in it."""
    folder = write_dumps(tmp_path / "d", simulate(8, 60, [Fault("missing", 3, 42)]))
    with tarfile.open(tmp_path / "dumps.tar.gz", "w:gz") as tar:
        tar.add(folder, "node/dumps")
    run = load(tmp_path / "dumps.tar.gz")
    assert causes(diagnose(run)) == {("missing", (3,))}


def _zipped(folder: Path, target: Path) -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, f"node/dumps/{path.name}")
    return target


def test_zip_files_of_dumps(tmp_path: Path) -> None:
    """A zip file is read like the directory in it, whatever its name."""
    folder = write_dumps(tmp_path / "d", simulate(8, 60, [Fault("missing", 3, 42)]))
    run = load(_zipped(folder, tmp_path / "dumps"))
    assert causes(diagnose(run)) == {("missing", (3,))}
    assert len(run.heads) == 8


@pytest.mark.parametrize("keep", [4, 100, 2000, -30, -10])
def test_a_zip_file_that_is_cut_off(tmp_path: Path, keep: int) -> None:
    """A damaged zip file is refused with an error that names it."""
    folder = write_dumps(tmp_path / "d", simulate(8, 20, []))
    path = _zipped(folder, tmp_path / "dumps.zip")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptRunError, match=re.escape(str(path))):
        load(path)


def test_a_zip_file_with_a_long_list(tmp_path: Path) -> None:
    """A list of members that would fill the memory is refused before it is read."""
    folder = write_dumps(tmp_path / "d", simulate(8, 20, []))
    path = _zipped(folder, tmp_path / "dumps.zip")
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\x05\x06")
    for changed, words in (
        (raw[: at + 12] + b"\xff\xff\xff\x7f" + raw[at + 16 :], "list of members"),
        (raw[:at] + b"PK\x06\x07" + bytes(16) + raw[at:], "make a tar file"),
    ):
        path.write_bytes(bytes(changed))
        with pytest.raises(CorruptRunError, match=words):
            load(path)


def test_an_encrypted_zip_file(tmp_path: Path) -> None:
    """An encrypted member is refused."""
    folder = write_dumps(tmp_path / "d", simulate(8, 20, []))
    path = _zipped(folder, tmp_path / "dumps.zip")
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x03\x04") + 6] |= 1
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(CorruptRunError, match="encrypted"):
        load(path)


def test_records_of_dumps_are_those_of_the_job(tmp_path: Path) -> None:
    """Ops, bytes, groups, call sites and sequence numbers come from the entries."""
    run = load(write_dumps(tmp_path / "d", simulate(8, 7)))
    mine = run.records.filter(run.records["rank"] == 0)
    assert mine["op"].to_list() == [
        *("all_reduce", "all_gather", "all_to_all", "send", "recv", "all_reduce"),
        *("reduce_scatter", "all_reduce"),
    ]
    assert mine["seq"].to_list() == [1, 2, 1, 1, 1, 3, 1, 1]
    assert mine["in_bytes"].to_list() == [8192, 4096, 1024, 512, 0, 2048, 16384, 2]
    assert mine["out_bytes"].to_list() == [8192, 16384, 1024, 0, 512, 2048, 16384, 2]
    assert mine["peer"].to_list() == [None] * 3 + [4, 4] + [None] * 3
    assert mine["call_site"].to_list()[0] == "/job/train.py:10"
    assert mine["status"].to_list() == ["completed"] * 8
    assert mine["device_ms"].to_list() == [None] * 8


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("nccl:all_reduce", ("nccl", "all_reduce", -1)),
        ("nccl:_all_gather_base", ("nccl", "all_gather", -1)),
        ("nccl:all_gather_into_tensor_coalesced", ("nccl", "all_gather", -1)),
        ("nccl:ALLGATHER_coalesced", ("nccl", "all_gather", -1)),
        ("nccl:_reduce_scatter_base", ("nccl", "reduce_scatter", -1)),
        ("nccl:REDUCE_SCATTER_coalesced", ("nccl", "reduce_scatter", -1)),
        ("nccl:all_reduce_barrier", ("nccl", "barrier", -1)),
        ("nccl:_broadcast_oop", ("nccl", "broadcast", -1)),
        ("nccl:_reduce_oop", ("nccl", "reduce", -1)),
        ("gloo:all_to_all", ("gloo", "all_to_all", -1)),
        ("nccl:send 0->3", ("nccl", "send", 3)),
        ("nccl:recv 0<-3", ("nccl", "recv", 3)),
        ("nccl:coalesced", ("nccl", "unknown", -1)),
        ("", ("", "unknown", -1)),
        (None, ("", "unknown", -1)),
    ],
)
def test_names_of_entries(name: Any, op: tuple[str, str, int]) -> None:
    """Each name that torch gives an entry stands for one of our ops."""
    assert op_of_entry(name) == op


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/rankcall-was-here",)


WORLD_OF_4 = dict.fromkeys(range(4), (0, 1, 2, 3))
IN_WORLD = (Step("world", "all_reduce"),)
GOOD = dump_of(simulate(8, 20), 0)
LONG_MEMO = b"\x80\x02}r\xff\xff\xff\x7f(X\x07\x00\x00\x00entries]u."
BAD = {
    "a global": pickle.dumps({**GOOD, "entries": [Evil()]}),
    "a huge memo index": LONG_MEMO,
    "a bytearray of 1 TB": b"\x80\x05}(\x8c\x07entries\x96"
    + (1 << 40).to_bytes(8, "little")
    + b"u.",
    "truncated": pickle.dumps(GOOD)[:-40],
    "a list of entries that are no dicts": pickle.dumps({**GOOD, "entries": [1, 2]}),
    "no entries": pickle.dumps({"version": "2.9", "pg_config": {}}),
    "no version": pickle.dumps({"entries": [], "pg_config": {}}),
    "version 1": pickle.dumps({**GOOD, "version": "1.5"}),
    "version 3": pickle.dumps({**GOOD, "version": "3.0"}),
    "deep JSON": b'{"entries":' + b"[" * 100_000,
    "truncated JSON": json.dumps(GOOD).encode()[:-5],
    "many objects": b'{"entries":[' + b"[]," * 4_000_001 + b"[]]}",
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_an_error_that_names_it(tmp_path: Path, what: str) -> None:
    """Nothing is executed, memory is bounded, and the message says which file it is."""
    path = tmp_path / "rank_0"
    path.write_bytes(BAD[what])
    with pytest.raises(CorruptRunError) as raised:
        load(tmp_path)
    assert str(path) in str(raised.value)
    assert not Path("/tmp/rankcall-was-here").exists()


@pytest.mark.parametrize(
    "begin", [b'{"version": "2.9", "entries": [', b"\x80\x02}(X\x07\0\0\0entries"]
)
def test_a_file_of_gigabytes_is_refused_unread(tmp_path: Path, begin: bytes) -> None:
    """The size is looked at first, so no memory is taken. Most of the 8 GB are a hole."""
    path = tmp_path / "rank_0"
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(8 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptRunError, match=r"rank_0: 8,589,934,592 bytes, more than any dump"):
        load(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_one_bad_file_beside_good_ones_is_stated(tmp_path: Path) -> None:
    """The other dumps are read, and the bad one counts as not there."""
    folder = write_dumps(tmp_path / "d", simulate(8, 60, [Fault("missing", 3, 42)]))
    (folder / "nccl_trace_rank_6").write_bytes(BAD["truncated"])
    run = load(folder)
    assert run.missing_ranks == [6]
    assert any("nccl_trace_rank_6" in problem for problem in texts(run.problems))
    assert [finding.ranks for finding in diagnose(run).findings] == [(3,)]


def test_a_newer_version_is_read_and_stated(tmp_path: Path) -> None:
    """A version of the same format that this rankcall does not know yet is read with a warning."""
    job = simulate(8, 60, [Fault("missing", 3, 42)])
    run = load(write_dumps(tmp_path / "d", job, version="2.11"))
    assert causes(diagnose(run)) == {("missing", (3,))}
    assert [problem for problem in texts(run.problems) if "2.11" in problem]


def test_the_trace_of_ncclx_is_stated_and_changes_nothing(tmp_path: Path) -> None:
    """A dump of NCCLX has its communicators' own trace, whose numbers are not those of torch."""
    colls = json.dumps([{"opCount": 40, "opName": "AllReduce", "codepath": "BASELINE"}])
    state = {"rank": "3", "nRanks": "8", "CT_pastColls": colls, "CT_currentColls": "[]"}
    for rank in range(8):
        content = dump_of(simulate(8, 60, [Fault("missing", 3, 42)]), rank)
        content["nccl_comm_state"] = {"0x4d5e": state}
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(content))
    run = load(tmp_path)
    assert causes(diagnose(run)) == {("missing", (3,))}
    assert len([text for text in texts(run.problems) if "NCCLX" in text]) == 1


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    """The message names both files."""
    job = simulate(8, 20)
    write_dumps(tmp_path / "d" / "a", job, "rank_{}")
    write_dumps(tmp_path / "d" / "b", job, "rank_{}")
    with pytest.raises(CorruptRunError, match=r"b/rank_0.*a/rank_0"):
        load(tmp_path / "d")


def test_a_file_under_another_ranks_name_is_left_out(tmp_path: Path) -> None:
    """Its groups do not contain the rank of its name."""
    job = simulate(16, 60, [Fault("missing", 3, 42)])
    folder = write_dumps(tmp_path / "d", job, "rank_{}")
    (folder / "rank_2").write_bytes((folder / "rank_9").read_bytes())
    run = load(folder)
    assert run.missing_ranks == [2]
    assert any("rank_2: its name says rank 2" in problem for problem in texts(run.problems))
    assert [finding.ranks for finding in diagnose(run).findings] == [(3,)]


def test_dumps_of_an_older_job_are_left_out(tmp_path: Path) -> None:
    """A dump that ended before other ranks began is of another job."""
    job = simulate(8, 60, [Fault("missing", 3, 42)])
    folder = write_dumps(tmp_path / "d", job, "rank_{}")
    old = dump_of(job, 5)
    for entry in old["entries"]:
        for name in ("time_created_ns", "time_discovered_completed_ns"):
            entry[name] = entry[name] and entry[name] - 3600 * 10**9
    (folder / "rank_5").write_bytes(pickle.dumps(old))
    run = load(folder)
    assert run.missing_ranks == [5]
    assert any("of another job" in problem for problem in texts(run.problems))


def test_a_directory_without_dumps_is_no_run(tmp_path: Path) -> None:
    """The message is the one for any other directory."""
    (tmp_path / "notes_1.txt").write_text("nothing\n")
    with zipfile.ZipFile(tmp_path / "a_1.zip", "w") as out:
        out.writestr("entries", "x")
    with pytest.raises(CorruptRunError, match="no ring files"):
        load(tmp_path)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = sorted(GOOD["entries"][0])
TOP = ("version", "pg_config", "pg_status", "entries", "host_name", "nccl_version")


@settings(deadline=None)
@given(st.sampled_from(FIELDS), plain, st.integers(0, 19))
def test_any_value_in_an_entry_is_survived(field: str, value: Any, at: int) -> None:
    """A field of another type or size never makes the reader fail."""
    entries = [dict(entry) for entry in GOOD["entries"]]
    entries[at % len(entries)][field] = value
    content = records_of(entries)
    assert len(content.records) <= len(entries)


def test_each_entry_may_have_a_back_end_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is no square of the entries, however many names a forged dump has."""
    seen: list[str] = []
    backend_of = records._backend
    monkeypatch.setattr(records, "_backend", lambda name: seen.append(name) or backend_of(name))
    issued = {"retired": True, "state": "scheduled", "time_discovered_completed_ns": None}
    forged = [
        {**GOOD["entries"][0], **issued, "profiling_name": f"b{number}:all_reduce"}
        for number in range(500)
    ]
    assert len(records_of(forged).records) == 500
    assert len(seen) <= 3 * len(forged)


@settings(deadline=None)
@given(st.sampled_from(TOP), plain, st.booleans())
def test_any_value_at_the_top_is_survived(
    tmp_path_factory: pytest.TempPathFactory, field: str, value: Any, as_json: bool
) -> None:
    """A file with any value in a field is read, or refused with an error of ours."""
    folder = tmp_path_factory.mktemp("d")
    content = {**GOOD, field: value}
    raw = json.dumps(content).encode() if as_json else pickle.dumps(content)
    (folder / "rank_0").write_bytes(raw)
    raised = None
    try:
        diagnose(load(folder))
    except RankcallError as error:
        raised = error
    assert raised is None or str(folder) in str(raised)


@settings(deadline=None)
@given(st.data())
def test_any_bytes_are_survived(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A file with changed bytes is read, or refused with an error that names it."""
    raw = bytearray(pickle.dumps({**GOOD, "entries": GOOD["entries"][:2]}))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("d") / "rank_0"
    path.write_bytes(bytes(raw))
    raised = None
    try:
        records_of(read_dump(path, [])["entries"])
    except CorruptRunError as error:
        raised = error
    assert raised is None or str(path) in str(raised)


def test_python_pickles_of_every_protocol_are_read(tmp_path: Path) -> None:
    """Tools that rewrite dumps use Python's own pickler."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        out = io.BytesIO()
        pickle.dump(GOOD, out, protocol)
        path = tmp_path / f"rank_{protocol}"
        path.write_bytes(out.getvalue())
        assert read_dump(path, []) == GOOD


@settings(deadline=None)
@given(st.data())
def test_any_bytes_of_a_zip_file_are_survived(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A zip file with changed bytes is read, or refused; the error names it or a file in it."""
    folder = tmp_path_factory.mktemp("d")
    path = folder / "dumps.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for rank in range(2):
            content = {**GOOD, "entries": GOOD["entries"][:2]}
            archive.writestr(f"dumps/rank_{rank}", pickle.dumps(content))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw))
    raised = None
    try:
        load(path)
    except CorruptRunError as error:
        raised = error
    assert raised is None or str(folder) in str(raised) or "rankcall-" in str(raised)
