//! [`Slot`]: page-aligned memory with exactly one owner.
//!
//! A slot travels: into a read, back with its completion, to whoever computes with it. As it is never shared while a
//! read is in flight, the kernel can never write into memory that someone looks at, and memory in flight cannot be
//! freed. Splitting is free; the mapping is released when its last slot is gone.

use std::sync::Arc;

/// The operating system refused the memory.
#[derive(Debug)]
pub struct AllocateError {
    /// What was asked for.
    pub len: usize,
    /// What it said.
    pub source: std::io::Error,
}

impl std::fmt::Display for AllocateError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot map {} bytes of memory: {}", self.len, self.source)
    }
}

impl std::error::Error for AllocateError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// An anonymous private mapping.
#[derive(Debug)]
struct Mapping {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a mapping is only unmapped, once, by its last owner; which thread that is does not matter to the kernel.
unsafe impl Send for Mapping {}
// SAFETY: a shared mapping has no method at all.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: ptr and len are what mmap gave; the last slot is gone, so no reference into the mapping is left.
        unsafe { libc::munmap(self.ptr.cast(), self.len) };
    }
}

/// A range of a mapping that nobody else can touch.
#[derive(Debug)]
pub struct Slot {
    ptr: *mut u8,
    len: usize,
    mapping: Arc<Mapping>,
}

// SAFETY: a slot is the only way to its bytes, as a Vec is; the mapping behind it is only ever unmapped, by its last
// owner.
unsafe impl Send for Slot {}
// SAFETY: a shared slot only gives shared views of its bytes.
unsafe impl Sync for Slot {}

impl Slot {
    /// Maps `len` zero bytes, page-aligned. Pages count as resident only once they are touched.
    pub fn allocate(len: usize) -> Result<Slot, AllocateError> {
        let len = len.max(1);
        // SAFETY: a new anonymous private mapping aliases nothing.
        let ptr = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if ptr == libc::MAP_FAILED {
            return Err(AllocateError { len, source: std::io::Error::last_os_error() });
        }
        let ptr = ptr.cast::<u8>();
        Ok(Slot { ptr, len, mapping: Arc::new(Mapping { ptr, len }) })
    }

    /// Cuts the slot in two; `self` keeps the first `at` bytes. Panics if `at > len`.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Slot {
        assert!(at <= self.len, "split at {at} of {} bytes", self.len);
        // SAFETY: at <= len, so the pointer stays within (or one past) the mapping.
        let ptr = unsafe { self.ptr.add(at) };
        let rest = Slot { ptr, len: self.len - at, mapping: Arc::clone(&self.mapping) };
        self.len = at;
        rest
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the slot has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Asks for huge pages, which save address translation where much is read in sequence: a hint, best given before
    /// the memory is touched. Memory then becomes resident 2 MiB at a time, so only for slots that will be filled. A
    /// kernel that does not know them says no, and nothing changes.
    pub fn prefer_huge_pages(&self) {
        // SAFETY: advice on pages of our own mapping changes none of its bytes; the pages at the ends may be a
        // neighbour slot's, of the same mapping.
        unsafe {
            let before = self.ptr.addr() % page_bytes();
            libc::madvise(self.ptr.sub(before).cast(), self.len + before, libc::MADV_HUGEPAGE)
        };
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: ptr .. ptr + len lies in the mapping, is initialised (anonymous memory is zero), and only this slot
        // reaches it.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    /// The bytes, to be written.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` is the only borrow.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

/// Bytes of a page: slots start at multiples of them, and become resident by them. 4096 on most machines, 16384 on many
/// phones and on some boards.
#[must_use]
pub fn page_bytes() -> usize {
    // SAFETY: a question without arguments in memory.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).expect("every system has a page size")
}

/// Gives memory that was freed, but that the allocator keeps for later, back to the system. For moments after which
/// much less is needed than before; where the allocator offers no such call, nothing happens.
pub fn release_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: glibc's allocator takes its own locks; memory in use is not touched.
    unsafe {
        libc::malloc_trim(0)
    };
}

#[cfg(test)]
mod tests {
    use super::Slot;

    #[test]
    fn huge_pages_change_no_content() {
        let mut slot = Slot::allocate(5 << 20).unwrap();
        // Neither starts nor ends at a page.
        let mut slot = slot.split_off(1234);
        let rest = slot.split_off((4 << 20) + 17);
        let pattern = |index: usize| (index % 251) as u8;
        for (index, byte) in slot.bytes_mut().iter_mut().enumerate().take(3 << 20) {
            *byte = pattern(index);
        }
        slot.prefer_huge_pages();
        for (index, &byte) in slot.bytes().iter().enumerate() {
            assert_eq!(byte, if index < 3 << 20 { pattern(index) } else { 0 }, "byte {index}");
        }
        assert!(rest.bytes().iter().all(|&byte| byte == 0));
        Slot::allocate(4096).unwrap().split_off(4096).prefer_huge_pages();
    }

    #[test]
    fn slots_start_at_pages() {
        let page = super::page_bytes();
        assert!(page.is_power_of_two() && page >= 4096);
        for len in [1, 4096, page + 1] {
            assert_eq!(Slot::allocate(len).unwrap().bytes().as_ptr().addr() % page, 0);
        }
    }

    #[test]
    fn split_slots_are_disjoint_and_outlive_each_other() {
        let mut head = Slot::allocate(8192).unwrap();
        let mut tail = head.split_off(4096);
        tail.bytes_mut().fill(7);
        head.bytes_mut().fill(3);
        assert!(tail.bytes().iter().all(|&b| b == 7));
        drop(head);
        assert_eq!(tail.bytes()[4095], 7);
    }
}
