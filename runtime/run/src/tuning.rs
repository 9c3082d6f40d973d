//! Which controller plans the layers of a sparse run, and the files that what a device was measured to do is kept in:
//! beside `model.lsb`, `model.lsp` is the profile and `model.lut` the table made of it.

use crate::exit::UsageError;
use crate::session::Session;
use ls_control::{Controller, ErrorClass, Fixed, Lut, Target};
use ls_engine::system::ControllerKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where a bundle's table lies.
pub(crate) fn table_path(bundle: &Path) -> PathBuf {
    bundle.with_extension("lut")
}

/// Where a bundle's profile lies.
pub(crate) fn profile_path(bundle: &Path) -> PathBuf {
    bundle.with_extension("lsp")
}

/// Whether a controller is made of a table.
pub(crate) fn wants_table(kind: ControllerKind) -> bool {
    !matches!(kind, ControllerKind::OneShot | ControllerKind::Fixed)
}

/// The table beside a bundle of so many layers. One that cannot be used here is warned of; that there is none is only an
/// error if it is `required`.
pub(crate) fn table(
    bundle: &Path,
    layers: usize,
    here: &Target,
    required: bool,
) -> anyhow::Result<Option<Lut>> {
    let path = table_path(bundle);
    let lut = match Lut::open(&path) {
        Ok(lut) => lut,
        Err(error) if error.class() == ErrorClass::Io && !path.exists() => {
            return match required {
                true => Err(UsageError(format!(
                    "this controller needs {}: `ls-run tune` makes it",
                    path.display()
                ))
                .into()),
                false => Ok(None),
            };
        }
        Err(error) => {
            eprintln!("warning: {error}; layers run by the fixed plan");
            return Ok(None);
        }
    };
    let other = lut.layers() != layers;
    let misfit = other.then(|| format!("made for {} layers, there are {layers}", lut.layers()));
    if let Some(misfit) = lut.target().misfit(here).or(misfit) {
        eprintln!("warning: {}: {misfit}; layers run by the fixed plan", path.display());
        return Ok(None);
    }
    Ok(Some(lut))
}

/// The controller of a kind; `table` is there if the kind wants one.
pub(crate) fn controller(kind: ControllerKind, table: Option<&Lut>) -> Box<dyn Controller> {
    let table = || table.expect("without a table the controller is fixed");
    match kind {
        ControllerKind::OneShot => Box::new(Fixed::ONE_SHOT),
        ControllerKind::Fixed => Box::new(Fixed::DEFAULT),
        ControllerKind::Static => Box::new(table().best_static()),
        ControllerKind::Lut | ControllerKind::Hindsight => Box::new(table().clone()),
    }
}

/// What a table must have been made for to be of use in a session.
pub(crate) fn target(session: &Session) -> Target {
    Target {
        device: device(session.bundle.path()),
        settings: session.settings(),
        bundle: Target::fingerprint(&session.bundle),
    }
}

/// The processor, and the disk below a path, as the system names them.
fn device(path: &Path) -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let of = |name: &str| {
        let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
    };
    // Arm's kernels give numbers only.
    let processor = of("model name").or_else(|| of("CPU part")).unwrap_or_default();
    let disk = disk(path).unwrap_or_else(|| "a disk without a name".into());
    short(format!("{processor} ({}), {disk}", ls_cpu::Kernels::detect().name()))
}

/// A disk's name, and its model where it tells.
fn disk(path: &Path) -> Option<String> {
    let number = std::fs::metadata(path).ok()?.dev();
    // As Linux packs them into one number.
    let major = (number >> 8 & 0xfff) | (number >> 32 & !0xfff);
    let minor = (number & 0xff) | (number >> 12 & !0xff);
    let link = format!("/sys/dev/block/{major}:{minor}");
    let Ok(mut folder) = std::fs::canonicalize(link) else {
        return Some(format!("disk {major}:{minor}"));
    };
    if folder.join("partition").exists() {
        folder.pop();
    }
    let name = folder.file_name()?.to_string_lossy().into_owned();
    let model = std::fs::read_to_string(folder.join("device/model")).unwrap_or_default();
    Some(format!("{name} {}", model.trim()).trim().to_owned())
}

/// What a target's text may hold.
pub(crate) fn short(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(Target::MAX_TEXT_BYTES));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target { device: "a".into(), settings: "b".into(), bundle: 3 }
    }

    #[test]
    fn a_table_is_used_where_it_was_made_for_and_nowhere_else() {
        let folder = tempfile::tempdir().unwrap();
        let bundle = folder.path().join("model.lsb");
        assert!(table(&bundle, 1, &target(), false).unwrap().is_none());
        let error = table(&bundle, 1, &target(), true).unwrap_err();
        assert!(error.to_string().contains("ls-run tune"), "{error}");
        let plan = ls_control::CoordinationPlan::ONE_SHOT;
        let quantizer = ls_control::Quantizer::of_samples(&[]);
        let lut = Lut::new(target(), 1, plan, [(quantizer, [plan; ls_control::STATES])]);
        lut.save(&table_path(&bundle)).unwrap();
        assert_eq!(table(&bundle, 1, &target(), true).unwrap(), Some(lut));
        assert!(table(&bundle, 2, &target(), true).unwrap().is_none(), "a forged one");
        for other in [
            Target { device: "other".into(), ..target() },
            Target { settings: "other".into(), ..target() },
            Target { bundle: 4, ..target() },
        ] {
            assert!(table(&bundle, 1, &other, true).unwrap().is_none(), "{other:?}");
        }
        std::fs::write(table_path(&bundle), "nonsense").unwrap();
        assert!(table(&bundle, 1, &target(), true).unwrap().is_none());
    }

    #[test]
    fn a_device_has_a_name_that_fits() {
        let name = device(Path::new("."));
        assert!(!name.is_empty() && name.len() <= Target::MAX_TEXT_BYTES, "{name}");
        assert_eq!(name, device(Path::new(".")));
    }
}
