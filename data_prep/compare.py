"""Whether what is there was made by the same settings of the same text.

Files are known by their sizes and times, and where the times differ by their text; a dataset of the
hub by its revision; botocore by its version; a source of this process alone by its text, which is
read again.
"""

from data_prep.job import JOB_FILE, Job, read_json
from data_prep.merge import history
from data_prep.places import Place
from data_prep.records import RECORD_FILE, finished
from data_prep.work import same_text
from nearlinear.data.format import FORMAT_VERSION, Manifest


def difference(old: dict, new: dict) -> str:
    """What differs between two settings, in one line: `seed 0 -> 1, ...`."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(f"{key} {_short(old.get(key))} -> {_short(new.get(key))}" for key in keys)


def other_left(partial: Place, job: Job) -> str:
    """How the job that left splits in `partial`, or its input, differs; empty if it does not."""
    old = read_json(partial / JOB_FILE)
    if old is None:
        return f"{JOB_FILE} missing"
    if changed := difference({"format": old.get("format")}, {"format": FORMAT_VERSION}):
        return changed
    if changed := difference(old["settings"], job.settings):
        return changed
    if not job.inputs and job.source.revision is None:
        if changed := difference(old["provenance"], job.source.provenance):
            return changed
    sizes, now = [file[1] for file in old["inputs"]], [file.bytes for file in job.inputs]
    if sizes != now:
        return f"input {sum(sizes)} -> {sum(now)} bytes"
    if old["splits"] != [list(split) for split in job.splits]:
        return "input of other pieces"
    if old["inputs"] != [list(file) for file in job.inputs] or _by_text_alone(job):
        for place in finished(partial):
            record = read_json(place / RECORD_FILE)
            if record and not same_text(job, record["split"], record["documents"], record["text"]):
                return f"input, the text of split {record['split']} is another"
    return ""


def other_input(manifest: Manifest, out: Place, job: Job) -> str:
    """How the input of a finished dataset differs from the job's; empty when it does not.

    Files that are as they were, by name, size and time, are not read again.
    """
    if not job.inputs and not _by_text_alone(job):
        return ""
    before = [file["bytes"] for file in manifest.plan["inputs"]]
    if before != [file.bytes for file in job.inputs]:
        return f"input {sum(before)} -> {sum(file.bytes for file in job.inputs)} bytes"
    if job.inputs and history(out).get("inputs") == [list(file) for file in job.inputs]:
        return ""
    for number, (*piece, count, text) in enumerate(manifest.plan["splits"]):
        if piece != list(job.splits[number][:3]) or not same_text(job, number, count, text):
            return f"input, the text of split {number} is another"
    return ""


def uncompared(job: Job) -> str:
    """A line that says that the text of a job cannot be told from another; empty when it can."""
    if job.source.revision is None or job.settings["revision"] or _by_text_alone(job):
        return ""
    return (
        f"note: the text of {job.source.name} was not compared with what was read before: the "
        "Hugging Face hub did not tell its revision; --overwrite prepares it anew"
    )


def _by_text_alone(job: Job) -> bool:
    return job.source.spec is None and not job.settings.get("revision")


def _short(value) -> str:
    text = str(value)
    return text[:12] + "..." if len(text) > 40 else text
