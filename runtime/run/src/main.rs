//! `ls-run`: see the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    ls_run::main()
}
