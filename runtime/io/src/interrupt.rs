//! Ctrl-C as a question that a loop can ask, instead of the end of the program.
//!
//! After [`catch`], the first `SIGINT` only sets a mark that [`take`] finds. A second one before the mark was taken ends
//! the process: whoever does not listen must not keep a person from leaving.

use std::sync::atomic::{AtomicBool, Ordering};

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
