// HMAC-SHA256 of the engine: the test cases of RFC 4231, and texts around the block size.
#include "hmac.h"

#include <cstdio>
#include <string>

#include "check.h"

using namespace nlc;

namespace {

std::string hex(const Key &key) {
  std::string text;
  char two[3];
  for (const uint8_t byte : key) {
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

}  // namespace

int main() {
  std::string counted;
  for (char letter = 1; letter <= 25; ++letter) counted += letter;
  const std::string large(131, '\xaa');

  // RFC 4231, test cases 1 to 4, 6 and 7 (case 5 truncates)
  CHECK(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK(hex(hmac_sha256(counted, std::string(50, '\xcd'))) ==
        "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK(hex(hmac_sha256(large, "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(hex(hmac_sha256(large,
                        "This is a test using a larger than block-size key and a larger than "
                        "block-size data. The key needs to be hashed before being used by the HMAC "
                        "algorithm.")) ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");

  // FIPS 180-4 examples; 55, 56 and 64 letters need one, two and two blocks (sha256sum)
  CHECK(hex(sha256::digest("")) ==
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256::digest("abc")) ==
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(sha256::digest(std::string(55, 'a'))) ==
        "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  CHECK(hex(sha256::digest(std::string(56, 'a'))) ==
        "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  CHECK(hex(sha256::digest(std::string(64, 'a'))) ==
        "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");

  Key one = hmac_sha256("k", "t"), other = one;
  CHECK(equal(one, other));
  for (size_t i = 0; i < one.size(); ++i) {
    other = one;
    other[i] ^= 1;
    CHECK(!equal(one, other));
  }
  std::puts("ok");
}
