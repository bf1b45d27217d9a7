"""The volumes of one pod as directories: made when it starts, kept up to date while it runs, as the kubelet does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kube.kinds import Document
from tests.kube.pod_env import Lookup, NotThere, resource_value

_DATA = "..data"


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeFile:
    """One file of a volume that Kubernetes writes."""

    path: str
    content: bytes
    mode: int


class PodVolumes:
    """All volumes of a pod below `root`; claims live below `claims`, beyond the pod."""

    def __init__(self, lookup: Lookup, *, root: Path, claims: Path) -> None:
        self._lookup = lookup
        self._root = root
        self._claims = claims
        self._volumes = {volume["name"]: volume for volume in lookup.pod["spec"].get("volumes", ())}
        self._written: dict[str, list[VolumeFile]] = {}

    def mounts_of(self, container: Mapping[str, Any]) -> dict[str, Path]:
        """The real directory at each mount path of a container; a `subPath` is what it leads to now, for good."""
        mounts = {}
        for mount in container.get("volumeMounts", ()):
            place = self.place(mount["name"])
            sub_path = mount.get("subPath")
            mounts[mount["mountPath"].rstrip("/")] = (place / sub_path).resolve() if sub_path else place
        return mounts

    def place(self, name: str) -> Path:
        """The real directory of a volume. Raises NotThere."""
        if name not in self._volumes:
            raise NotThere(f"a mount of volume {name!r}, which the pod does not have")
        volume = self._volumes[name]
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            return self._claims / volume["persistentVolumeClaim"]["claimName"]
        return self._root / name

    def update(self) -> None:
        """Makes directories that are missing, and writes files that have changed. Raises NotThere."""
        for name, volume in self._volumes.items():
            files = self._files(volume)
            place = self.place(name)
            if files is None:
                place.mkdir(parents=True, exist_ok=True)
            elif self._written.get(name) != files:
                swap_files(place, files)
                self._written[name] = files
        self._make_sub_paths()

    def _make_sub_paths(self) -> None:
        for container in self._lookup.pod["spec"]["containers"]:
            for mount in container.get("volumeMounts", ()):
                if "subPath" in mount and self._files(self._volumes[mount["name"]]) is None:
                    (self.place(mount["name"]) / mount["subPath"]).mkdir(parents=True, exist_ok=True)

    def _files(self, volume: Document) -> list[VolumeFile] | None:
        """The files that make up a volume; None for one that the containers write themselves."""
        sources = volume["projected"].get("sources", ()) if "projected" in volume else [volume]
        is_written = any(kind in volume for kind in ("projected", "configMap", "secret", "downwardAPI"))
        return [file for source in sources for file in self._source_files(source)] if is_written else None

    def _source_files(self, source: Document) -> Iterator[VolumeFile]:
        for kind, plural in (("configMap", "configmaps"), ("secret", "secrets")):
            if kind in source:
                yield from self._data_files(source[kind], plural)
        for item in source.get("downwardAPI", {}).get("items", ()):
            value = self._downward(item)
            yield VolumeFile(path=item["path"], content=value.encode(), mode=item.get("mode", 0o644))

    def _downward(self, item: Document) -> str:
        if "fieldRef" in item:
            return self._lookup.field(item["fieldRef"]["fieldPath"])
        reference = item["resourceFieldRef"]
        containers = {container["name"]: container for container in self._lookup.pod["spec"]["containers"]}
        return resource_value(containers[reference["containerName"]], reference)

    def _data_files(self, source: Document, plural: str) -> Iterator[VolumeFile]:
        try:
            data = self._lookup.data(plural, source.get("name") or source.get("secretName", ""))
        except NotThere:
            if source.get("optional"):
                return
            raise
        mode = source.get("defaultMode", 0o644)
        items = source.get("items") or [{"key": key, "path": key} for key in sorted(data)]
        for item in items:
            if item["key"] not in data:
                raise NotThere(f"no key {item['key']!r} in {plural} of volume")
            yield VolumeFile(path=item["path"], content=data[item["key"]], mode=item.get("mode", mode))


def swap_files(place: Path, files: list[VolumeFile]) -> None:
    """Replaces all files of a volume at once: links lead through `..data`, which is moved from old to new."""
    place.mkdir(parents=True, exist_ok=True)
    number = len(list(place.glob("..v*")))
    new = place / f"..v{number}"
    for file in files:
        target = new / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        target.chmod(file.mode)
    new.mkdir(exist_ok=True)
    link = place / f"..data_{number}"
    link.symlink_to(new.name)
    link.replace(place / _DATA)
    wanted = {Path(file.path).parts[0] for file in files}
    for name in wanted:
        if not (place / name).is_symlink():
            (place / name).symlink_to(Path(_DATA) / name)
    for found in place.iterdir():
        if found.is_symlink() and not found.name.startswith("..") and found.name not in wanted:
            found.unlink()
