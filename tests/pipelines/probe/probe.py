"""A stage that does as its spec says: what jobs and the driver are tested with."""

import os
import signal
import time

import pipelines
from stages import artifact
from stages.spec import Stopped


def run(spec, out, inputs, context):
    for step in range(1, 4):
        context.progress(step=step, of=3)
    match spec.parameters["do"]:
        case "mistake":
            raise ValueError("training.batch: found 0, wanted at least 1.")
        case "error":
            raise RuntimeError("a fault of ours")
        case "crash once" if out.name == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            while not context.stop_requested():
                time.sleep(0.02)
            (out / "saved").write_text("work")
            raise Stopped("saved after 3 steps")
    text = f"{os.environ['OMP_NUM_THREADS']}\n"
    if spec.parameters["do"].startswith("where"):
        text = f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {os.environ.get('TPU_VISIBLE_CHIPS')} {context.settings['backend']}"
    if spec.parameters["do"] == "whose code":
        text = f"{os.environ.get('STRATA_CODE')} {pipelines.__file__}"
    if spec.parameters["do"] == "read":
        text = "read " + inputs["made"].read_text()
    (out / "made.txt").write_text(text)
    artifact.write(out, key=spec.key, stage="probe", files=["made.txt"], inputs={})
