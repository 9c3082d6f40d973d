//! The exit codes shared by the project's programs, in one place so that scripts can rely on them.

/// Why a program ended. The numbers are part of the command line's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Everything asked for was done.
    Ok = 0,
    /// The command line makes no sense.
    Usage = 2,
    /// An input breaks the rules of its own format.
    Corrupt = 3,
    /// An input is well formed as far as it goes, but part of it is missing.
    Incomplete = 4,
    /// An input is valid, but asks for something this version does not do.
    Unsupported = 5,
    /// The memory budget is below the minimum (`ls-run` only).
    BudgetTooSmall = 6,
    /// The operating system refused to read or write.
    Io = 7,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        std::process::ExitCode::from(exit as u8)
    }
}
