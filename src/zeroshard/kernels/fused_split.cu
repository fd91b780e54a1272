// Masters as the bits that their parameters lack (arithmetic/split_bits.py): joined with them, and taken apart.

extern "C" __global__ void join_(uint32* master, const bf16* param, const short* lower, const uint8* ties, int numel) {
  int at = thread();
  if (at < numel) master[at] = ((uint32)param[at].bits << 16) + int(lower[at]) + ((ties[at / 8] >> at % 8 & 1) << 16);
}

extern "C" __global__ void split_(short* lower, uint8* ties, const uint32* master, int numel) {  // a thread for a byte
  int from = thread() * 8;
  if (from >= numel) return;
  uint32 packed = 0;
  for (int at = from; at < min(from + 8, numel); at++) {
    lower[at] = short(master[at]);
    packed |= uint32(lower[at] == -32768 && (master[at] & 1 << 16) == 0) << at - from;
  }
  ties[from / 8] = packed;
}
