//! Ctrl-C as a question that a loop can ask, instead of the end of the program; and an end that leaves nothing behind.
//!
//! After [`catch`], the first `SIGINT` only sets a mark that [`take`] finds. A second one before the mark was taken ends
//! the process: whoever does not listen must not keep a person from leaving.
//!
//! While a [`Doomed`] file lives, a signal that ends the process removes it first.

use std::ffi::{CStr, CString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// The code that shells give a process that `SIGINT` ended.
const EXIT_CODE: i32 = 130;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupted(_signal: libc::c_int) {
    // Relaxed: the mark carries no other memory.
    if INTERRUPTED.swap(true, Ordering::Relaxed) {
        // SAFETY: `_exit` is async-signal-safe and takes any code.
        unsafe { libc::_exit(EXIT_CODE) }
    }
}

/// From now on `SIGINT` sets a mark. Calls into the kernel that it falls into go on (`SA_RESTART`).
pub fn catch() -> std::io::Result<()> {
    // SAFETY: all zeros are a valid `sigaction`: no flags, an empty mask, the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = interrupted as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the action is complete, and its handler only uses an atomic and `_exit`.
    let failed = unsafe { libc::sigaction(libc::SIGINT, &action, std::ptr::null_mut()) };
    if failed == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Whether `SIGINT` came since the last call.
pub fn take() -> bool {
    INTERRUPTED.swap(false, Ordering::Relaxed)
}

/// The file that a signal removes, if there is one.
static DOOMED: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());

/// Signals by which people and systems end programs.
const ENDS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

extern "C" fn remove_and_end(signal: libc::c_int) {
    // Acquire: pairs with the Release in `Doomed::new`, behind which the name is complete.
    let name = DOOMED.load(Ordering::Acquire);
    if !name.is_null() {
        // SAFETY: the name is a string that is never freed; `unlink` is async-signal-safe.
        unsafe { libc::unlink(name) };
    }
    // SAFETY: all are async-signal-safe. The signal is blocked until this returns, and then ends the process as it would
    // have without this handler.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// A file that is not complete yet: what ends this process by `SIGINT`, `SIGTERM` or `SIGHUP` removes it. One at a time.
#[derive(Debug)]
pub struct Doomed(());

impl Doomed {
    /// Dooms `path` as long as the result lives.
    pub fn new(path: &Path) -> std::io::Result<Doomed> {
        // Leaked, as a signal may come at any time: a few bytes, once a file.
        let name: &'static CStr =
            Box::leak(CString::new(path.as_os_str().as_bytes())?.into_boxed_c_str());
        DOOMED.store(name.as_ptr().cast_mut(), Ordering::Release);
        for signal in ENDS {
            // SAFETY: the handler only makes calls that are async-signal-safe.
            let before =
                unsafe { libc::signal(signal, remove_and_end as *const () as libc::sighandler_t) };
            if before == libc::SIG_ERR {
                return Err(std::io::Error::last_os_error());
            }
            if before == libc::SIG_IGN {
                // Whoever started us wants it ignored, as `nohup` does.
                // SAFETY: as above.
                unsafe { libc::signal(signal, libc::SIG_IGN) };
            }
        }
        Ok(Doomed(()))
    }
}

impl Drop for Doomed {
    fn drop(&mut self) {
        // The handlers stay: without a name they do what would happen anyway.
        DOOMED.store(std::ptr::null_mut(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_interrupt_is_found_once() {
        super::catch().unwrap();
        assert!(!super::take());
        // SAFETY: a signal to this process, whose handler was just installed.
        unsafe { libc::raise(libc::SIGINT) };
        assert!(super::take());
        assert!(!super::take());
    }
}
