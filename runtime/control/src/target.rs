//! [`Target`]: what a profile was measured on and a table was made for.

use crate::error::ControlError;
use crate::seal::{Reader, Writer};
use ls_bundle::{Bundle, checksum};
use std::fmt;

/// A device, what ran there, and how. Two runs whose targets are equal can use one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// Processor and disk, as the system names them. At most 256 bytes, as the others are.
    pub device: String,
    /// What decides which bytes are wanted and which are there: system, sparsity, budget, threads.
    pub settings: String,
    /// Tells the bundle from others, see [`Target::fingerprint`].
    pub bundle: u64,
}

impl Target {
    /// Bytes of each text, at most.
    pub const MAX_TEXT_BYTES: usize = 256;

    /// What tells a bundle from others: the checksum of its sections' checksums, and so of all its bytes.
    #[must_use]
    pub fn fingerprint(bundle: &Bundle) -> u64 {
        let sums = bundle.sections().iter().flat_map(|section| section.checksum.to_le_bytes());
        checksum::of(&sums.collect::<Vec<u8>>())
    }

    /// How `here` differs from this, to be shown; none if it does not.
    #[must_use]
    pub fn misfit(&self, here: &Target) -> Option<String> {
        let differ = |what: &str, made: &dyn fmt::Display, here: &dyn fmt::Display| {
            Some(format!("made for {what} `{made}`, this is `{here}`"))
        };
        if self.device != here.device {
            return differ("device", &self.device, &here.device);
        }
        if self.bundle != here.bundle {
            let hex = |bundle: u64| format!("{bundle:016x}");
            return differ("bundle", &hex(self.bundle), &hex(here.bundle));
        }
        if self.settings != here.settings {
            return differ("settings", &self.settings, &here.settings);
        }
        None
    }

    pub(crate) fn is_sound(&self) -> bool {
        [&self.device, &self.settings].iter().all(|text| text.len() <= Target::MAX_TEXT_BYTES)
    }

    pub(crate) fn write(&self, to: &mut Writer) {
        to.u64(self.bundle);
        to.text(&self.device);
        to.text(&self.settings);
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Target, ControlError> {
        Ok(Target {
            bundle: from.u64()?,
            device: from.text("bytes of the device's name", Target::MAX_TEXT_BYTES)?,
            settings: from.text("bytes of the settings", Target::MAX_TEXT_BYTES)?,
        })
    }
}
