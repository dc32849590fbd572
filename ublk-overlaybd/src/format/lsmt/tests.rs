use super::*;
use proptest::prelude::*;

#[test]
fn a_header_has_the_bytes_of_the_format() {
    let mut header = Header::new(Flags::COMMITTED_HEADER, 4 << 20);
    header.uuid = Uuid::parse_str("0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9").unwrap();
    header.user_tag = b"hello".to_vec();
    let bytes = header.encode().unwrap();
    assert_eq!(bytes[..8], [0x4C, 0x53, 0x4D, 0x54, 0, 1, 2, 0]);
    assert_eq!(bytes[24..32], [0x86, 1, 0, 0, 7, 0, 0, 0]);
    assert_eq!(bytes[48..56], (4u64 << 20).to_le_bytes());
    assert_eq!(&bytes[56..93], b"0A1B2C3D-4E5F-6071-8293-A4B5C6D7E8F9\0");
    assert_eq!(&bytes[93..130], b"00000000-0000-0000-0000-000000000000\0");
    assert_eq!(bytes[130..140], *b"\0\0\x01\x01hello\0");
    assert_eq!(Header::parse(&bytes).unwrap(), header);
}

#[test]
fn garbage_where_nobody_looks_is_no_error() {
    let mut bytes = Header::new(Flags::TRAILER, 512).encode().unwrap();
    bytes[24] = 7;
    bytes[56..93].fill(0xAB);
    bytes[130..134].fill(0xCD);
    bytes[134..].fill(b'x');
    let header = Header::parse(&bytes).unwrap();
    assert!(header.uuid.is_nil());
    assert_eq!(header.user_tag, [b'x'; 256]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut header = Header::new(Flags::TRAILER, 512);
    header.user_tag = vec![b'x'; 257];
    assert_eq!(header.encode(), Err(HeaderError::UserTag(257)));
    header.user_tag.clear();
    header.virtual_size = u64::MAX;
    assert_eq!(header.encode(), Err(HeaderError::VirtualSize(u64::MAX)));
    let both = Header::new(Flags::from_bits(0x33), 512);
    assert!(both.encode().unwrap_err().to_string().contains("sparse and hybrid"));
    assert_eq!(Header::parse(&[0; 100]), Err(HeaderError::TooShort(100)));
    assert_eq!(Header::parse(&[0; 4096]), Err(HeaderError::Magic("magic0")));
}

#[test]
fn padding_is_what_the_format_says() {
    assert_eq!(Entry::parse(&PADDING), Ok(None));
    assert_eq!(Entry::parse(&[0; 16]), Err(EntryError::Empty { offset: 0 }));
}

#[test]
fn entries_never_wrap() {
    let entry = Entry { offset: 1, length: 1, moffset: 8, zeroed: false, tag: 0 };
    assert_eq!(Entry { length: 0, ..entry }.encode(), Err(EntryError::Empty { offset: 1 }));
    assert_eq!(Entry { length: 16384, ..entry }.encode(), Err(EntryError::Length(16384)));
    assert!(Entry { offset: MAX_SECTORS, ..entry }.encode().is_err());
    assert!(Entry { offset: u64::MAX, ..entry }.encode().is_err());
    assert!(Entry { moffset: MAX_MOFFSET, ..entry }.encode().is_err());
    assert!(entry.is_within(9) && !entry.is_within(8));
    assert!(Entry { zeroed: true, ..entry }.is_within(8));
    assert!(!Entry { moffset: 7, ..entry }.is_within(100));
}

proptest! {
    #[test]
    fn entries_survive(offset in 0..MAX_SECTORS - 16384, length in 1..=MAX_LENGTH, moffset in 0..MAX_MOFFSET, zeroed: bool, tag: u8) {
        let entry = Entry { offset, length, moffset, zeroed, tag };
        prop_assert_eq!(Entry::parse(&entry.encode().unwrap()), Ok(Some(entry)));
    }

    #[test]
    fn whatever_parses_encodes_to_the_same(bytes: [u8; 16]) {
        if let Ok(Some(entry)) = Entry::parse(&bytes) {
            prop_assert_eq!(entry.encode(), Ok(bytes));
        }
    }

    #[test]
    fn headers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..5000)) {
        let _ = Header::parse(&bytes);
        let mut with_magic = Header::new(Flags::default(), 0).encode().unwrap().to_vec();
        let len = bytes.len().min(4096 - 24);
        with_magic[24..24 + len].copy_from_slice(&bytes[..len]);
        if let Ok(header) = Header::parse(&with_magic) {
            prop_assert_eq!(&Header::parse(&header.encode().unwrap()).unwrap(), &header);
        }
    }
}
