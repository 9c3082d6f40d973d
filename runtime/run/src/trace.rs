//! [`Trace`]: `--trace`, from the flag to the file.

use crate::session::Session;
use anyhow::Context;
use ls_bundle::files::replace_with;
use ls_bundle::ids::ByteCount;
use ls_engine::Engine;
use ls_engine::timeline::Timeline;
use std::path::{Path, PathBuf};

/// Events that there is room for: some fifty tokens of a small model.
const EVENTS: usize = 1 << 16;

/// Where a timeline is to be written, if anywhere.
pub(crate) struct Trace {
    path: Option<PathBuf>,
}

impl Trace {
    /// Keeps room for a timeline in the plan that is to be made.
    pub(crate) fn to(path: Option<&Path>, session: &mut Session) -> Trace {
        if path.is_some() {
            session.reserve(ByteCount(Timeline::bytes(EVENTS)));
        }
        Trace { path: path.map(Path::to_owned) }
    }

    /// What the engine does from now on is kept.
    pub(crate) fn begin(&self, engine: &mut Engine) {
        if self.path.is_some() {
            engine.trace(Timeline::with_capacity(EVENTS));
        }
    }

    /// Writes what was kept.
    pub(crate) fn end(self, engine: &mut Engine) -> anyhow::Result<()> {
        let Some(path) = self.path else { return Ok(()) };
        let timeline = engine.trace(Timeline::off());
        replace_with(&path, &mut |out| timeline.write(out))
            .with_context(|| format!("writing {}", path.display()))?;
        match timeline.left_out() {
            0 => eprintln!("{}: open it at https://ui.perfetto.dev", path.display()),
            n => eprintln!("{}: the first {EVENTS} events; {n} more had no room", path.display()),
        }
        Ok(())
    }
}
