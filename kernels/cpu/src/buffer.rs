//! Memory of the backend: zeroed pages that become resident when they are touched, and a way for threads to write
//! into disjoint parts of them.

use ls_sync::Slot;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// Numbers in a slot, aligned to a cache line.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    slot: Slot,
    kind: PhantomData<T>,
}

/// Buffers of `count` T take this many bytes: whole cache lines.
pub(crate) const fn buffer_bytes<T>(count: usize) -> usize {
    (count * size_of::<T>()).next_multiple_of(64)
}

impl<T: bytemuck::Pod> Buffer<T> {
    /// Takes the first `count` T off `slot`, which starts at a multiple of 64 bytes and does so again afterwards.
    pub(crate) fn take(slot: &mut Slot, count: usize) -> Buffer<T> {
        let rest = slot.split_off(buffer_bytes::<T>(count));
        let mut own = std::mem::replace(slot, rest);
        let _ = own.split_off(count * size_of::<T>());
        Buffer { slot: own, kind: PhantomData }
    }

    /// A view for threads.
    pub(crate) fn shared(&mut self) -> SharedMut<'_, T> {
        SharedMut::new(self)
    }
}

impl<T: bytemuck::Pod> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(self.slot.bytes())
    }
}

impl<T: bytemuck::Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.slot.bytes_mut())
    }
}

/// A slice that several threads write to, each to elements of its own.
#[derive(Debug)]
pub(crate) struct SharedMut<'a, T> {
    ptr: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

impl<T> Clone for SharedMut<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SharedMut<'_, T> {}

// SAFETY: it only gives access through unsafe functions, whose callers keep threads apart.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        SharedMut { ptr: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Elements `first .. first + count`. Panics if there are fewer.
    ///
    /// # Safety
    /// While the result is in use nobody else accesses these elements.
    pub(crate) unsafe fn slice(&self, first: usize, count: usize) -> &'a mut [T] {
        assert!(count <= self.len && first <= self.len - count, "{first} + {count} > {}", self.len);
        // SAFETY: in bounds; exclusive by the caller's guarantee, and the whole by the borrow behind `new`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(first), count) }
    }

    /// A pointer to element `index`, from which the elements up to the end may be reached. Panics if there is none.
    pub(crate) fn at(&self, index: usize) -> *mut T {
        assert!(index < self.len, "element {index} of {}", self.len);
        // SAFETY: in bounds.
        unsafe { self.ptr.add(index) }
    }
}
