"""May this run start?  Two captured graphs, a verdict, the waivers that someone signed, and a manifest of what ran.

    admission = admit(train_file, infer_file, run_folder, enforcement="start", waivers=load_waivers("waivers.json"))

`waivers` are named exceptions that expire; `manifest` pins digests and versions in the run's folder and says by name
what a later start changed; `gate` decides.  No trainer and no engine is imported here.
"""

from __future__ import annotations

from jetgraph.admission.gate import DRAFT, Admission, Enforcement, NotAdmitted, admit
from jetgraph.admission.manifest import RunManifest
from jetgraph.admission.waivers import Waiver, WaiverError, load_waivers

__all__ = [
    "DRAFT",
    "Admission",
    "Enforcement",
    "NotAdmitted",
    "RunManifest",
    "Waiver",
    "WaiverError",
    "admit",
    "load_waivers",
]
