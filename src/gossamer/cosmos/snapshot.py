"""Snapshots on disk: HDF5 in the layout of GADGET-4, whole or not there at all."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gossamer.cosmos.box import Box, State, check_state
from gossamer.cosmos.cosmology import Cosmology, as_cosmology

CRITICAL = 27.753662724  # 3 (100 km/s/Mpc)^2 / (8 pi G), in 1e10 Msun/h per (Mpc/h)^3
UNITS = {"UnitLength_in_cm": 3.085677581e24, "UnitMass_in_g": 1.98841e43, "UnitVelocity_in_cm_per_s": 1e5}
# Powers of a, h, and the units of length, mass and velocity of what is stored, by which readers know a dataset's unit.
POWERS = ("a_scaling", "h_scaling", "length_scaling", "mass_scaling", "velocity_scaling")
DIMENSIONS: dict[str, tuple[float, ...]] = {
    "Coordinates": (1, -1, 1, 0, 0),
    "Velocities": (0.5, 0, 0, 0, 1),
    "Momenta": (0, 0, 0, 0, 1),
    "ParticleIDs": (0, 0, 0, 0, 0),
}
CGS = {"Coordinates": UNITS["UnitLength_in_cm"], "ParticleIDs": 0.0}  # the others are velocities
FORM = 1  # of the group that is ours
KINDS = 6  # of particles that GADGET-4 counts
DARK = 1  # "PartType1"


class Snapshot(NamedTuple):
    """The content of a file."""

    state: State
    box: Box
    cosmology: Cosmology


def save(state: State, box: Box, cosmology: Any, path: str | Path) -> None:
    """Write a snapshot in the layout of GADGET-4, which yt and pynbody read.

    `PartType1` has Coordinates (comoving Mpc/h), Velocities (GADGET's: sqrt(a) dx/dt, km/s), ParticleIDs (from 1 on, in
    the order of the lattice) and our Momenta (a^2 dx/dt, km/s); masses are in the header in 1e10 Msun/h. The file
    appears when all of it is on the disk: a failure leaves what was there before.

    Args:
        state: of the box.
        box: the box.
        cosmology: a `Cosmology`, or one of jax_cosmo's.
        path: of the file.

    Raises:
        ValueError: an argument is wrong.
        OSError: it could not be written; the message says why, and what is left.

    Examples:
        >>> box, cosmology = cosmos.Box(size_mpc_h=64.0, particles=8), cosmos.Cosmology()
        >>> state = cosmos.initial_conditions(jax.random.key(0), cosmology, box, a=0.02)
        >>> cosmos.save(state, box, cosmology, "snapshot_000.hdf5")
        >>> bool((cosmos.load("snapshot_000.hdf5").state.momenta_km_s == state.momenta_km_s).all())
        True
    """
    import h5py

    check_state(state, box)
    cosmology = as_cosmology(cosmology)
    path = Path(path)
    arrays = _arrays(state)
    about = _about(float(state.a), box, cosmology)
    memory = io.BytesIO()  # so that only Python writes to the disk, and says what goes wrong there
    with h5py.File(memory, "w") as file:
        for name, about_all in _headers(state, box, cosmology).items():
            file.create_group(name).attrs.update(about_all)
        group = file.create_group(f"PartType{DARK}")
        for name, values in arrays.items():
            group[name] = values
            known = dict(zip(POWERS, DIMENSIONS[name], strict=True))
            group[name].attrs.update(known, to_cgs=CGS.get(name, UNITS["UnitVelocity_in_cm_per_s"]))
        ours = file.create_group("gossamer")
        ours.attrs["about"] = about
        ours.attrs["sha256"] = _digest(about, arrays)
    whole_file(path, memory.getbuffer())


def load(path: str | Path) -> Snapshot:
    """Read a snapshot that `save` wrote, bit for bit as it was.

    Args:
        path: of the file.

    Raises:
        ValueError: it is damaged, or was written by another program.
        OSError: it cannot be read.

    Examples:
        >>> box, cosmology = cosmos.Box(size_mpc_h=64.0, particles=8), cosmos.Cosmology()
        >>> state = cosmos.initial_conditions(jax.random.key(0), cosmology, box, a=0.02)
        >>> cosmos.save(state, box, cosmology, "snapshot_000.hdf5")
        >>> cosmos.load("snapshot_000.hdf5").box == box
        True
    """
    import h5py

    content = Path(path).read_bytes()
    try:
        with h5py.File(io.BytesIO(content), "r") as file:
            if "gossamer" not in file:
                raise ValueError(f"{str(path)!r} was not written by gossamer.cosmos: it has no group 'gossamer'")
            about, digest = (str(file["gossamer"].attrs[name]) for name in ("about", "sha256"))
            arrays = {name: values[()] for name, values in file[f"PartType{DARK}"].items()}
    except (OSError, KeyError, RuntimeError) as error:
        raise ValueError(f"the snapshot {str(path)!r} is damaged: {error}") from None
    if _digest(about, arrays) != digest:
        raise ValueError(f"the snapshot {str(path)!r} is damaged: its numbers are not those that were written")
    known = json.loads(about)
    if known["form"] != FORM:
        raise ValueError(f"the snapshot {str(path)!r} is of form {known['form']}; this release reads {FORM}")
    dtype = arrays["Momenta"].dtype
    with_type = jnp.asarray(arrays["Momenta"]).dtype
    if with_type != dtype:
        raise ValueError(f"the snapshot {str(path)!r} is in {dtype}; set jax_enable_x64 to read it as it is")
    state = State(jnp.asarray(arrays["Coordinates"]), jnp.asarray(arrays["Momenta"]), jnp.asarray(known["a"], dtype))
    return Snapshot(state, Box(**known["box"]), Cosmology(**known["cosmology"]))


def whole_file(path: Path, content: Any) -> None:
    """Write a file so that it appears when all of it is on the disk.

    Raises:
        OSError: it could not be written; the message says why, and what is left.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        left = "what was there before is as it was" if path.exists() else "nothing was left there"
        raise OSError(error.errno, f"{str(path)!r} could not be written ({error.strerror}); {left}") from None


def _arrays(state: State) -> dict[str, np.ndarray]:
    x, p = (np.asarray(part) for part in (state.positions_mpc_h, state.momenta_km_s))
    velocities = (p / np.float64(state.a) ** 1.5).astype(p.dtype)
    return {
        "Coordinates": x,
        "Velocities": velocities,
        "ParticleIDs": np.arange(1, len(x) + 1, dtype=np.uint32),
        "Momenta": p,
    }


def _about(a: float, box: Box, cosmology: Cosmology) -> str:
    numbers = {name: float(value) for name, value in cosmology._asdict().items()}
    shape = {name: getattr(box, name) for name in ("size_mpc_h", "particles", "mesh", "softening_kpc_h")}
    return json.dumps({"form": FORM, "a": a, "box": shape, "cosmology": numbers})


def _digest(about: str, arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _headers(state: State, box: Box, cosmology: Cosmology) -> dict[str, dict[str, Any]]:
    counts, masses = np.zeros(KINDS, np.uint64), np.zeros(KINDS)
    counts[DARK] = box.num_particles
    masses[DARK] = CRITICAL * float(cosmology.Omega_m) * box.volume_mpc3_h3 / box.num_particles
    a = float(state.a)
    first, *rest = box.size_mpc_h
    size: Any = first if all(length == first for length in rest) else np.asarray(box.size_mpc_h)
    dark = 1 - float(cosmology.Omega_m) - float(cosmology.Omega_k)
    parameters = {
        "Omega0": float(cosmology.Omega_m), "OmegaLambda": dark, "OmegaBaryon": float(cosmology.Omega_b),
        "HubbleParam": float(cosmology.h), "Hubble": 100.0, "BoxSize": size, "ComovingIntegrationOn": 1,
        "SofteningComovingClass0": box.softening_mpc_h, **UNITS,
    }  # fmt: skip
    header = {
        "NumPart_ThisFile": counts, "NumPart_Total": counts, "NumPart_Total_HighWord": np.zeros(KINDS, np.uint32),
        "MassTable": masses, "Time": a, "Redshift": 1 / a - 1, "BoxSize": size, "NumFilesPerSnapshot": 1,
        "Omega0": float(cosmology.Omega_m), "OmegaLambda": dark, "HubbleParam": float(cosmology.h),
        "Flag_Sfr": 0, "Flag_Cooling": 0, "Flag_Feedback": 0, "Flag_StellarAge": 0, "Flag_Metals": 0,
    }  # fmt: skip
    return {"Header": header, "Parameters": parameters, "Units": dict(UNITS)}
