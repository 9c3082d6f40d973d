//! System calls that the system refuses, as in a sandbox.

/// A system call, and a bit pattern that its third argument must contain to be refused.
pub(crate) struct Refusal {
    pub(crate) call: libc::c_long,
    pub(crate) argument_bits: u32,
    pub(crate) errno: i32,
}

/// Forbids a call to this thread and those that it starts.
pub(crate) fn refuse(refusal: &Refusal) {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const JUMP_IF_BITS: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // Offsets are those of `seccomp_data`: the call's number, and the low half of its third argument.
    let third = 16 + 2 * 8 + if cfg!(target_endian = "big") { 4 } else { 0 };
    let bits = if refusal.argument_bits == 0 {
        step(LOAD, 0, 0, 0)
    } else {
        step(JUMP_IF_BITS, 0, 1, refusal.argument_bits)
    };
    let mut program = [
        step(LOAD, 0, 0, 0),
        step(JUMP_IF_EQUAL, 0, 3, refusal.call as u32),
        step(LOAD, 0, 0, third),
        bits,
        step(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | refusal.errno as u32),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the filter outlives the calls, which copy it; both only restrict this thread.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter), 0);
    }
}
