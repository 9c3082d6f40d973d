//! What happens to one read between submit and completion, whoever performs it.
//!
//! A store asks [`Progress::missing`] what to request, performs it, and gives the outcome to [`Progress::absorb`], which
//! says whether the read is over. Short reads go on with the remainder; interruptions are tried again; `EIO` is tried
//! once more, as a disk may recover by itself once; everything else ends the read.

use std::io;

use crate::error::{IoError, Kind};
use crate::source::Rules;
use crate::store::{BlockRead, Completion, Counters};

/// Most bytes in one request; the kernel would cut it shortly below 2 GiB anyway.
const MAX_REQUEST_BYTES: usize = 1 << 30;

/// `EINTR` and its like accepted for one read before it fails: a way out of a loop that should never be long.
const MAX_INTERRUPTIONS: u32 = 1000;

/// A read on its way.
#[derive(Debug)]
pub(crate) struct Progress {
    read: BlockRead,
    /// Bytes that lie within the file; the rest of the window is zeros.
    needed: usize,
    /// Bytes already in place; a multiple of the alignment.
    filled: usize,
    tried_again: bool,
    interruptions: u32,
    retries: u32,
}

/// What to ask the kernel for next.
#[derive(Debug)]
pub(crate) struct Missing<'a> {
    pub(crate) bytes: &'a mut [u8],
    /// Of its first byte in the file.
    pub(crate) offset: u64,
}

/// Whether a read is over.
#[derive(Debug)]
pub(crate) enum Step {
    Again,
    Over(Result<(), IoError>),
}

impl Progress {
    /// Panics if the read breaks the rules of [`crate::BlockStore::submit`].
    pub(crate) fn start(read: BlockRead, rules: &Rules) -> Progress {
        let unit = rules.alignment.offset as usize;
        let memory = rules.alignment.memory as usize;
        assert!(
            read.len <= read.into.len(),
            "{} bytes into a slot of {}",
            read.len,
            read.into.len()
        );
        assert!(
            read.offset.is_multiple_of(unit as u64) && read.len.is_multiple_of(unit),
            "read of {} bytes at {} is not aligned to {unit}",
            read.len,
            read.offset
        );
        assert!(
            read.into.bytes().as_ptr().addr().is_multiple_of(memory),
            "memory is not aligned to {memory}"
        );
        let limit = rules.len.next_multiple_of(unit as u64);
        let within = read.offset.checked_add(read.len as u64).is_some_and(|end| end <= limit);
        // A read that reaches behind the last window stays short and fails there.
        let needed = if within {
            rules.len.saturating_sub(read.offset).min(read.len as u64) as usize
        } else {
            read.len
        };
        Progress { read, needed, filled: 0, tried_again: false, interruptions: 0, retries: 0 }
    }

    /// What is to be read next.
    pub(crate) fn missing(&mut self) -> Missing<'_> {
        let offset = self.read.offset + self.filled as u64;
        let end = self.read.len.min(self.filled + MAX_REQUEST_BYTES);
        Missing { bytes: &mut self.read.into.bytes_mut()[self.filled..end], offset }
    }

    /// Takes the outcome of the last request: bytes read, or the error number.
    pub(crate) fn absorb(&mut self, outcome: Result<usize, i32>, rules: &Rules) -> Step {
        let step = self.judge(outcome, rules);
        if matches!(step, Step::Again) {
            self.retries += 1;
        }
        step
    }

    fn judge(&mut self, outcome: Result<usize, i32>, rules: &Rules) -> Step {
        match outcome {
            Ok(bytes) => {
                let reached = self.filled + bytes;
                if reached >= self.needed {
                    self.read.into.bytes_mut()[self.needed..self.read.len].fill(0);
                    return Step::Over(Ok(()));
                }
                // Requests start at aligned offsets only. No progress means that the file ends here.
                let kept = reached - reached % rules.alignment.offset as usize;
                if kept == self.filled {
                    return Step::Over(Err(self.truncated(rules)));
                }
                self.filled = kept;
                Step::Again
            }
            // ECANCELED, EFAULT: the thread that submitted the read has ended, or was ending while the kernel copied.
            // The memory is a slot's, which is there until the read is done.
            Err(libc::EINTR | libc::EAGAIN | libc::ECANCELED | libc::EFAULT)
                if self.interruptions < MAX_INTERRUPTIONS =>
            {
                self.interruptions += 1;
                Step::Again
            }
            Err(libc::EIO) if !self.tried_again => {
                self.tried_again = true;
                Step::Again
            }
            Err(errno) => Step::Over(Err(self.failed(errno, rules))),
        }
    }

    fn truncated(&self, rules: &Rules) -> IoError {
        let wanted = self.read.offset.saturating_add(self.needed as u64);
        let (offset, len) = (self.read.offset, self.read.len);
        Kind::Truncated { path: rules.path.clone(), offset, len, wanted }.into()
    }

    fn failed(&self, errno: i32, rules: &Rules) -> IoError {
        Kind::Read {
            path: rules.path.clone(),
            offset: self.read.offset,
            len: self.read.len,
            source: io::Error::from_raw_os_error(errno),
        }
        .into()
    }

    /// Counts the read and gives it back.
    pub(crate) fn finish(self, result: Result<(), IoError>, counters: &mut Counters) -> Completion {
        counters.retries += u64::from(self.retries);
        if result.is_ok() {
            counters.reads += 1;
            counters.bytes += self.read.len as u64;
        }
        Completion { read: self.read, result }
    }

    /// The range that was asked for: first byte and length.
    pub(crate) fn range(&self) -> (u64, usize) {
        (self.read.offset, self.read.len)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ls_sync::Slot;

    use super::*;
    use crate::store::Alignment;

    const RULES_LEN: u64 = 10_000;

    fn rules() -> Rules {
        let alignment = Alignment { offset: 512, memory: 512 };
        Rules { path: Path::new("file").into(), len: RULES_LEN, alignment }
    }

    fn start(offset: u64, len: usize) -> Progress {
        let mut into = Slot::allocate(len).unwrap();
        into.bytes_mut().fill(9);
        Progress::start(BlockRead { offset, len, into, tag: 0 }, &rules())
    }

    fn error(step: Step) -> IoError {
        match step {
            Step::Over(Err(e)) => e,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_short_read_goes_on_at_the_last_whole_unit() {
        let mut progress = start(1024, 4096);
        assert!(matches!(progress.absorb(Ok(1500), &rules()), Step::Again));
        let missing = progress.missing();
        assert_eq!((missing.offset, missing.bytes.len()), (2048, 3072));
        assert!(matches!(progress.absorb(Ok(3072), &rules()), Step::Over(Ok(()))));
        let mut counters = Counters::default();
        progress.finish(Ok(()), &mut counters);
        assert_eq!(counters, Counters { reads: 1, bytes: 4096, retries: 1 });
    }

    #[test]
    fn the_last_window_ends_with_the_file_and_is_filled_with_zeros() {
        let mut progress = start(9728, 512);
        assert!(matches!(progress.absorb(Ok(272), &rules()), Step::Over(Ok(()))));
        let bytes = progress.read.into.bytes();
        assert_eq!((bytes[271], bytes[272], bytes[511]), (9, 0, 0));
    }

    #[test]
    fn a_read_that_makes_no_progress_is_the_end_of_the_file() {
        let mut progress = start(0, 4096);
        assert!(matches!(progress.absorb(Ok(700), &rules()), Step::Again));
        let error = error(progress.absorb(Ok(188), &rules()));
        assert!(error.is_truncated(), "{error}");
        assert!(super::tests::error(start(0, 512).absorb(Ok(0), &rules())).is_truncated());
    }

    #[test]
    fn interruptions_are_tried_again_but_not_for_ever() {
        let mut progress = start(0, 512);
        for errno in [libc::EINTR, libc::EAGAIN, libc::ECANCELED, libc::EFAULT]
            .into_iter()
            .cycle()
            .take(1000)
        {
            assert!(matches!(progress.absorb(Err(errno), &rules()), Step::Again));
        }
        let error = error(progress.absorb(Err(libc::EINTR), &rules()));
        assert_eq!(error.errno(), Some(libc::EINTR));
    }

    #[test]
    fn other_errors_end_the_read_at_once() {
        let error = error(start(512, 1024).absorb(Err(libc::ENXIO), &rules()));
        assert_eq!(error.errno(), Some(libc::ENXIO));
        assert!(error.to_string().starts_with("file: cannot read 1024 bytes at offset 512: "));
    }
}
